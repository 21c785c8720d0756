"""What a lost rank is told as."""

from __future__ import annotations

from ..contract import SpecdecodeError


class WorkerDied(SpecdecodeError):
    """A rank of a tensor-parallel engine has ended, or does not go along: the engine cannot go on."""
