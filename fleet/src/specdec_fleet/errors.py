"""Errors of a fleet."""

from __future__ import annotations

import re

from specdecode.api.engine_thread import EngineDeadError
from specdecode.contract import SpecdecodeError


class RequestLostError(EngineDeadError):
    """A request that no replica completed; it says how often it was tried. Over HTTP its status is 503."""


class ReplicaLost(SpecdecodeError):
    """A replica, or the way to it, was lost while it worked on a request. Users never see it.

    Args:
        shunned: seconds for which nothing is to be sent there any more.
    """

    def __init__(self, reason: str, *, shunned: float = 0.0) -> None:
        super().__init__(reason)
        self.shunned = shunned


#: How a traceback begins to tell an exception; its frames and their lines are indented.
_TOLD = re.compile(r"^(?:(?:\w+\.)+[A-Z]\w*|[A-Z]\w*(?:Error|Exception)): (?=\S)", re.MULTILINE)


def cause_of(told: str) -> str:
    """The last exception of the tracebacks that Ray passes on as one text; that text if it has none."""
    if not (found := list(_TOLD.finditer(told))):
        return told
    last = found[-1]
    if last[0].startswith("specdecode."):  # one of ours says all there is to say, perhaps in several lines
        return told[last.end() :].strip()
    return told[last.start() :].splitlines()[0]
