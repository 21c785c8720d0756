"""A proposer around another that writes down all it is told and all it gives."""

from __future__ import annotations

from collections.abc import Sequence

from ...contract import Commit, Drafts, Proposer, RequestInfo, StepView
from ..recording import Recording
from .wrapping import WrappingProposer


class RecorderProposer(WrappingProposer):
    """Passes everything on, and writes it down."""

    def __init__(self, inner: Proposer, into: Recording) -> None:
        super().__init__(inner)
        self._recording = into

    def on_add(self, request: RequestInfo) -> None:
        self._recording.added(request)
        super().on_add(request)

    def on_commit(self, commits: Sequence[Commit]) -> None:
        for commit in commits:
            self._recording.committed(commit)
        super().on_commit(commits)

    def on_preempt(self, request_id: str) -> None:
        self._recording.preempted(request_id)
        super().on_preempt(request_id)

    def on_finish(self, request_id: str, reason: str) -> None:
        self._recording.finished(request_id)
        super().on_finish(request_id, reason)

    def propose(self, step: StepView, out: Drafts) -> None:
        try:
            super().propose(step, out)
        except Exception as error:
            self._recording.failures.append(error)
            raise
        self._recording.proposed(step, out)
