"""Draft models that break a promise which the output does not show: of their state, and of static steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...contract import Commit, Drafts, Proposer, StepView
from .draft_model import DraftModelProposer


class _Altered:
    """A view that shows other values for some names."""

    def __init__(self, step: StepView, **values: Any) -> None:
        self._step = step
        self._values = values

    def __getattr__(self, name: str) -> Any:
        return self._values[name] if name in self._values else getattr(self._step, name)


class Missed:
    """Counts the steps in which ``propose`` was not reached."""

    def __init__(self) -> None:
        self._pending = 0

    def committed(self) -> None:
        self._pending += 1

    def proposed(self) -> bool:
        """Whether a step was missed since the last call."""
        missed, self._pending = self._pending > 1, 0
        return missed


# -- state -----------------------------------------------------------------------------------------
class StaleDraftModel(DraftModelProposer):
    """Believes after a preemption that its entries are still there, and feeds nothing sensible."""

    def __init__(self, path: str) -> None:
        super().__init__(path, None)
        self._stale: set[str] = set()

    def on_preempt(self, request_id: str) -> None:
        self._stale.add(request_id)

    def on_finish(self, request_id: str, reason: str) -> None:
        self._stale.discard(request_id)

    def propose(self, step: StepView, out: Drafts) -> None:
        stale = torch.tensor([request_id in self._stale for request_id in step.request_ids])
        ids = step.ids.masked_fill(stale.to(step.ids.device)[step.rows], 0)
        super().propose(_Altered(step, ids=ids), out)  # type: ignore[arg-type]
        self._stale.difference_update(step.request_ids)


class LosesItsPlace(DraftModelProposer):
    """Drafts nonsense in the step after one that it missed."""

    def __init__(self, path: str) -> None:
        super().__init__(path, None)
        self._missed = Missed()

    def on_commit(self, commits: Sequence[Commit]) -> None:
        self._missed.committed()

    def propose(self, step: StepView, out: Drafts) -> None:
        super().propose(step, out)
        if self._missed.proposed():
            out.ids.fill_(3)


# -- static steps ----------------------------------------------------------------------------------
class CountsPadding(DraftModelProposer):
    """Takes every fed token for a new one, though a static step feeds a row's last one again."""

    def __init__(self, path: str) -> None:
        super().__init__(path, 1)

    def propose(self, step: StepView, out: Drafts) -> None:
        fed = torch.zeros_like(step.own_len).scatter_add_(0, step.rows, torch.ones_like(step.rows))
        super().propose(_Altered(step, committed_len=step.own_len + fed), out)  # type: ignore[arg-type]


class RebindsState(DraftModelProposer):
    """Keeps a count in a tensor, and makes a new one of it each step."""

    def __init__(self, path: str) -> None:
        super().__init__(path, None)
        self._steps = torch.zeros(1)

    def propose(self, step: StepView, out: Drafts) -> None:
        super().propose(step, out)
        self._steps = self._steps + 1


class CopiesIndices(DraftModelProposer):
    """Has the first draft marked by a list of indices, which travels to the device."""

    def __init__(self, path: str) -> None:
        super().__init__(path, None)

    def propose(self, step: StepView, out: Drafts) -> None:
        super().propose(step, out)
        out.score[:, [0]] = 1.0


DRAFT_MODELS: dict[str, Callable[[str], Proposer]] = {
    "stale-entries": StaleDraftModel,
    "loses-its-place": LosesItsPlace,
    "counts-padding": CountsPadding,
    "rebinds-state": RebindsState,
    "copies-indices": CopiesIndices,
}
