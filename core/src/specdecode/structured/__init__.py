"""Structured outputs: text that keeps to a JSON schema, a regular expression, a choice or a grammar.

llguidance computes which tokens may come next; it is imported with the first request that asks.
"""

from .grammar import GrammarCompiler
from .params import GuidedDecodingParams, StructuredOutputsConfig, StructuredOutputsParams
from .state import GrammarState

__all__ = [
    "GrammarCompiler",
    "GrammarState",
    "GuidedDecodingParams",
    "StructuredOutputsConfig",
    "StructuredOutputsParams",
]
