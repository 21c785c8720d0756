"""Prompts, as vLLM spells them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NotRequired, TypedDict


class MultiModalData(TypedDict, total=False):
    """What a prompt holds beside text: an image for each placeholder in it, in their order."""

    image: Any  #: a ``PIL.Image.Image``, or a list of them


class TextPrompt(TypedDict):
    """A prompt as text. ``cache_salt`` keeps its cached prefix apart from other salts'."""

    prompt: str
    multi_modal_data: NotRequired[MultiModalData]
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    multi_modal_data: NotRequired[MultiModalData]
    cache_salt: NotRequired[str]


#: A list of ints: bare token ids.
PromptType = str | list[int] | TextPrompt | TokensPrompt

__all__ = ["MultiModalData", "PromptType", "TextPrompt", "TokensPrompt"]
