"""A tokenizer as llguidance reads it: the bytes of each token, and which ones end the text."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from specdecode.contract import ConfigError

from .params import FIELD

if TYPE_CHECKING:
    from llguidance import LLTokenizer

#: Added where a model has no end-of-sequence token, since the library wants one. It is never drawn.
_NO_EOS = "<|no_end_of_sequence|>"


def llguidance_tokenizer(tokenizer: Any, vocab_size: int, eos_ids: Collection[int]) -> LLTokenizer:
    """``tokenizer`` for llguidance; of a large vocabulary this takes about a second.

    Args:
        tokenizer: a transformers fast tokenizer, or None.
        vocab_size: the model's.
        eos_ids: the model's; may be empty.

    Raises:
        ConfigError: there is no tokenizer, or none whose tokens are known as bytes.
    """
    from llguidance import LLTokenizer
    from tokenizers import AddedToken, Tokenizer

    if tokenizer is None:
        raise ConfigError(
            f"{FIELD} wants a tokenizer and skip_tokenizer_init=True left none: use allowed_token_ids"
        )
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise ConfigError(
            f"{FIELD} wants a fast tokenizer, got {type(tokenizer).__name__}: name another with tokenizer="
        )
    own = Tokenizer.from_str(backend.to_str())  # type: ignore[attr-defined]  # unknown to its stubs
    own.no_padding()
    own.no_truncation()
    ends = sorted(eos_ids)
    if not ends:
        own.add_special_tokens([AddedToken(_NO_EOS, special=True, normalized=False)])
        ends = [own.get_vocab()[_NO_EOS]]
    size = max(vocab_size, max(own.get_vocab(with_added_tokens=True).values()) + 1)
    try:
        return LLTokenizer(own.to_str(), n_vocab=size, eos_token=ends)
    except ValueError as error:
        raise ConfigError(
            f"{FIELD} wants a tokenizer whose tokens are known as bytes, and this one "
            f"({type(tokenizer).__name__}) cannot be read so: {error}: name another with tokenizer="
        ) from error
