"""What a model's text says beside its answer: reasoning and tool calls, by the names of their formats."""

from .answer import AnswerParser, Delta, ToolCall
from .reasoning import REASONING_PARSERS, ReasoningFormat
from .tools import TOOL_PARSERS, ToolFormat

__all__ = [
    "REASONING_PARSERS",
    "TOOL_PARSERS",
    "AnswerParser",
    "Delta",
    "ReasoningFormat",
    "ToolCall",
    "ToolFormat",
]
