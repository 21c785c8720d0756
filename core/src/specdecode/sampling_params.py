"""Sampling parameters, under the module name that scripts for vLLM import them from."""

from .api.params import RequestOutputKind, SamplingParams
from .structured.params import GuidedDecodingParams, StructuredOutputsParams

__all__ = ["GuidedDecodingParams", "RequestOutputKind", "SamplingParams", "StructuredOutputsParams"]
