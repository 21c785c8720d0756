"""Errors of a fleet."""

from __future__ import annotations

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
