"""The error that tells of a plugin's own fault."""

from __future__ import annotations

from specdecode.contract import SpecdecodeError

from .records import Status


class PluginError(SpecdecodeError):
    """A plugin cannot be loaded, or did not keep the contract. The plugin's own exception is the cause."""

    def __init__(self, message: str, status: Status = Status.BROKEN) -> None:
        self.status = status
        super().__init__(message)
