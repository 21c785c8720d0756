"""Logs as JSON, an object a line, or as text; what is said of a request is in fields of its own."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any, Literal, TextIO


class JsonFormatter(logging.Formatter):
    """An object a line: time, level, logger, message, what a request's line has, and a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        second = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry: dict[str, Any] = {
            "time": f"{second}.{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= getattr(record, "facts", {})
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


class TextFormatter(logging.Formatter):
    """A line for people; what a request's line has, as ``name=value``."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        facts = getattr(record, "facts", {})
        told = " ".join(f"{name}={value}" for name, value in facts.items() if value not in (None, []))
        return f"{line} {told}" if told else line


def log_to(stream: TextIO | None = None, *, format: Literal["text", "json"], level: str = "INFO") -> None:
    """Have everything logged go to ``stream`` (stderr)."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("httpx").setLevel(logging.WARNING)
