"""Prompts in all their spellings, to token ids; refused at the door where they cannot be served."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import TYPE_CHECKING, Any

import attrs

from ..contract import ConfigError
from .images import ImageDoor, refuse_images

if TYPE_CHECKING:
    from ..models import PromptImage


@attrs.frozen(kw_only=True)
class TokenizedPrompt:
    """A prompt ready to be scheduled."""

    token_ids: tuple[int, ...]
    text: str | None
    cache_salt: str
    images: tuple[PromptImage, ...] = ()
    cut: bool = False  #: ``token_ids`` are the end of what ``text`` is


def tokenize(
    prompt: Any, tokenizer: Any, *, door: ImageDoor | None = None, where: str = "prompt"
) -> TokenizedPrompt:
    """Token ids of a string, a TextPrompt, a TokensPrompt or a list of token ids, with its images.

    Args:
        door: puts images in; None: the model takes text only.

    Raises:
        ConfigError: ``where`` is none of these, text without a tokenizer, or refused by it; or see
            :meth:`ImageDoor.take`.
    """
    if isinstance(prompt, str):
        prompt = {"prompt": prompt}
    elif _are_ids(prompt):
        prompt = {"prompt_token_ids": prompt}
    if not isinstance(prompt, Mapping) or not ({"prompt", "prompt_token_ids"} & set(prompt)):
        raise ConfigError(
            f"{where} must be a string, a TextPrompt, a TokensPrompt or a list of token ids, "
            f"got {_shown(prompt)}"
        )
    for name in ("prompt_embeds", "multi_modal_uuids", "mm_processor_kwargs"):
        if prompt.get(name) is not None:
            raise ConfigError(f"{where}.{name} is refused: only text, token ids and images are built so far")
    data = prompt.get("multi_modal_data")
    if data is not None and door is None:
        refuse_images(data, where)
    text, ids, salt = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt")
    if salt is not None and not (isinstance(salt, str) and salt and salt.isprintable()):
        raise ConfigError(f"{where}.cache_salt must be a printable string that is not empty, got {salt!r}")
    if ids is None:
        if not isinstance(text, str):
            raise ConfigError(f"{where}.prompt must be a string, got {_shown(text)}")
        if tokenizer is None:
            raise ConfigError(
                f"{where} is text and skip_tokenizer_init=True left no tokenizer: pass prompt_token_ids"
            )
        with tokenizing(where):
            ids = tokenizer(text).input_ids
    ids = _ids(ids, where)
    images: tuple[PromptImage, ...] = ()
    if data and door is not None:
        ids, images = door.take(ids, data, where)
    return TokenizedPrompt(token_ids=ids, text=text, cache_salt=salt or "", images=images)


@contextmanager
def tokenizing(what: str) -> Iterator[None]:
    """Make an error of a tokenizer's own one about ``what``."""
    try:
        yield
    except Exception as error:
        raise ConfigError(
            f"{what} cannot be tokenized, the tokenizer raised {type(error).__name__}: {error}"
        ) from error


def truncate(
    prompt: TokenizedPrompt, keep: int | None, max_model_len: int, *, where: str = "prompt"
) -> TokenizedPrompt:
    """Its last ``keep`` tokens; -1: as many as leave room for an output token; None: all.

    Raises:
        ConfigError: it has images, of which that would leave parts.
    """
    most = max_model_len - 1 if keep == -1 else keep
    if most is None or len(prompt.token_ids) <= most:
        return prompt
    if prompt.images:
        raise ConfigError(
            f"truncate_prompt_tokens={keep} would cut {where}, whose images make it "
            f"{len(prompt.token_ids)} tokens: leave it out, or shorten the prompt"
        )
    return attrs.evolve(prompt, token_ids=prompt.token_ids[-most:], cut=True)


def _are_ids(prompt: Any) -> bool:
    """Whether it is one prompt as bare token ids: a list that begins with one."""
    return isinstance(prompt, Sequence) and bool(prompt) and isinstance(prompt[0], Integral)


def _ids(ids: Any, where: str) -> tuple[int, ...]:
    ids = ids.tolist() if hasattr(ids, "tolist") else ids
    if not isinstance(ids, Sequence) or isinstance(ids, str):
        raise ConfigError(f"{where}.prompt_token_ids must be a list of token ids, got {_shown(ids)}")
    for token in ids:
        if not isinstance(token, Integral) or isinstance(token, bool):
            raise ConfigError(f"{where}.prompt_token_ids must hold integers, got {token!r}")
    return tuple(map(int, ids))


def check_prompt(
    prompt: TokenizedPrompt, vocab_size: int, max_model_len: int, *, where: str = "prompt"
) -> None:
    """Refuse what the model cannot take.

    Raises:
        ConfigError: an empty prompt, an id outside the vocabulary, or no room for an output token.
    """
    ids = prompt.token_ids
    if not ids:
        raise ConfigError(f"{where} is empty ({_shown(prompt.text)}): give at least one token")
    if bad := [token for token in ids if not 0 <= token < vocab_size]:
        raise ConfigError(
            f"{where}.prompt_token_ids must be between 0 and {vocab_size - 1}, the target's vocabulary, "
            f"got {bad[0]}"
        )
    if len(ids) >= max_model_len:
        raise ConfigError(
            f"{where} has {len(ids)} tokens; with max_model_len={max_model_len} at most {max_model_len - 1} "
            "leave room for an output token: shorten it, or raise max_model_len"
        )


def listed(prompts: Any, prompt_token_ids: Any) -> list[Any]:
    """One list of prompts from ``generate``'s two arguments.

    Raises:
        ConfigError: both or none are given.
    """
    if prompt_token_ids is not None:
        if prompts is not None:
            raise ConfigError("prompts and prompt_token_ids are both given: keep one")
        single = not prompt_token_ids or isinstance(prompt_token_ids[0], int)
        return [{"prompt_token_ids": ids} for ids in ([prompt_token_ids] if single else prompt_token_ids)]
    if prompts is None:
        raise ConfigError("prompts is missing: give a prompt or a list of them")
    if isinstance(prompts, str | Mapping) or _are_ids(prompts):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise ConfigError(f"prompts must be a prompt or a list of prompts, got {_shown(prompts)}")
    return list(prompts)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
