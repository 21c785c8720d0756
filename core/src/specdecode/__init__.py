"""specdecode: an LLM inference engine for speculative decoding, with draft methods as plugins.

The names below load on first use; importing the package imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api.async_llm import AsyncEngineArgs, AsyncLLM, AsyncLLMEngine
    from .api.engine import EngineArgs, LLMEngine
    from .api.llm import LLM
    from .api.outputs import CompletionOutput, Logprob, RequestOutput
    from .api.params import RequestOutputKind, SamplingParams
    from .inputs import PromptType, TextPrompt, TokensPrompt
    from .lora.request import LoRARequest
    from .structured.params import GuidedDecodingParams, StructuredOutputsParams

__version__ = "0.1.0"

_HOME = {
    "LLM": ".api.llm",
    "LLMEngine": ".api.engine",
    "EngineArgs": ".api.engine",
    "AsyncLLM": ".api.async_llm",
    "AsyncLLMEngine": ".api.async_llm",
    "AsyncEngineArgs": ".api.async_llm",
    "SamplingParams": ".api.params",
    "RequestOutputKind": ".api.params",
    "RequestOutput": ".api.outputs",
    "CompletionOutput": ".api.outputs",
    "Logprob": ".api.outputs",
    "StructuredOutputsParams": ".structured.params",
    "GuidedDecodingParams": ".structured.params",
    "LoRARequest": ".lora.request",
    "TokensPrompt": ".inputs",
    "TextPrompt": ".inputs",
    "PromptType": ".inputs",
}

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "CompletionOutput",
    "EngineArgs",
    "GuidedDecodingParams",
    "LLMEngine",
    "LoRARequest",
    "Logprob",
    "PromptType",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
