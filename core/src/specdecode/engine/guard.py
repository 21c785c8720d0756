"""Stands between core and a proposer: what the proposer raises costs drafts, never a request."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from ..contract import Commit, Proposer, RequestInfo, TargetUpdate
from ..contract.errors import FAULTS

logger = logging.getLogger(__name__)

#: Method -> what its failure costs; of the others, drafts that fit less.
_COSTS = {"propose": "this step has no drafts"}
_OTHERS = "no output changes, but its later drafts may fit less"


class GuardedProposer:
    """Calls a proposer; counts what it raises and stops calling it after ``limit`` failures in a row.

    The hooks about requests are delivered to the end even when drafting is stopped, so that state
    can be freed. ``strict`` re-raises instead.
    """

    def __init__(self, proposer: Proposer, name: str, *, limit: int = 5, strict: bool = False) -> None:
        self.proposer = proposer
        self.name = name
        self.failures = 0
        self.quarantined = False
        self._limit = limit
        self._strict = strict
        self._in_a_row = 0
        self._failing: set[str] = set()  # methods that raised when they were last called

    def on_add(self, request: RequestInfo) -> bool:
        return self._call("on_add", request)

    def on_commit(self, commits: Sequence[Commit]) -> bool:
        return self._call("on_commit", commits)

    def on_preempt(self, request_id: str) -> bool:
        return self._call("on_preempt", request_id)

    def on_finish(self, request_id: str, reason: str) -> bool:
        return self._call("on_finish", request_id, reason)

    def on_target_updated(self, update: TargetUpdate) -> bool:
        return self._call("on_target_updated", update)

    def propose(self, draft: Callable[[Proposer], None]) -> bool:
        """Run ``draft``, which feeds the proposer and takes what it gives; True if nothing was raised.

        All of it is drafting, and a failed allocation for it costs drafts as well.
        """
        if self.quarantined or not self._guarded("propose", draft, self.proposer):
            return False
        self._in_a_row = 0
        return True

    def metrics(self) -> dict[str, float]:
        try:
            told = {f"{self.name}.{key}": float(value) for key, value in self.proposer.metrics().items()}
        except FAULTS:
            if self._strict:
                raise
            if "metrics" not in self._failing:  # it drafts all the same: told, and not counted
                self._failing.add("metrics")
                logger.exception("proposer %s failed in metrics; it has none", self.name)
            return {}
        self._failing.discard("metrics")
        return told

    def close(self) -> None:
        self._call("close")

    def _call(self, method: str, *args: Any) -> bool:
        return self._guarded(method, getattr(self.proposer, method), *args)

    def _guarded(self, method: str, function: Callable[..., Any], *args: Any) -> bool:
        try:
            function(*args)
        except FAULTS:
            if self._strict:
                raise
            self._failed(method)
            return False
        self._failing.discard(method)
        return True

    def _failed(self, method: str) -> None:
        self.failures += 1
        self._in_a_row += 1
        if method not in self._failing:
            self._failing.add(method)
            logger.exception("proposer %s failed in %s; %s", self.name, method, _COSTS.get(method, _OTHERS))
        if self._in_a_row >= self._limit and not self.quarantined:
            self.quarantined = True
            logger.error(
                "proposer %s failed %d times in a row and is not asked again; requests go on without drafts",
                self.name,
                self._in_a_row,
            )
