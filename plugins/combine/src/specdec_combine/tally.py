"""Which child's drafts were accepted.

A row's *spans* are the numbers of nodes that each child gave, in the order in which they hang together: of a
cascade one child has all, of an extension each has the next.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence

import torch
from specdecode.contract import Commit, StepView


class Tally(abc.ABC):
    """Counts of each child: rows drafted for, draft tokens, accepted tokens."""

    def __init__(self, count: int, width: int) -> None:
        self._count = count
        self._width = width

    def place(self, rows: int, device: torch.device) -> None:
        """Make what outlasts a step, for at most ``rows`` rows; called once, before any of them."""
        return None

    @abc.abstractmethod
    def proposed(self, step: StepView, spans: torch.Tensor) -> None:
        """``spans`` ``[B, n]`` int64 of the drafts of this step."""

    @abc.abstractmethod
    def read(self) -> list[tuple[float, float, float]]:
        """The counts of each child."""

    def committed(self, commits: Sequence[Commit]) -> None:
        """What the target made of drafts."""
        return None

    def forget(self, request_id: str) -> None:
        """The request's drafts will not be verified."""
        return None


class HostTally(Tally):
    """By request, exactly."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__(count, width)
        self._counts = [[0.0, 0.0, 0.0] for _ in range(count)]
        self._pending: dict[str, list[int]] = {}

    def proposed(self, step: StepView, spans: torch.Tensor) -> None:
        for request_id, own in zip(step.request_ids, spans.tolist(), strict=True):
            self._pending.pop(request_id, None)
            if any(own):
                self._pending[request_id] = own
            for child, nodes in enumerate(own):
                self._counts[child][0] += nodes > 0
                self._counts[child][1] += nodes

    def committed(self, commits: Sequence[Commit]) -> None:
        for commit in commits:
            left = commit.accepted
            for child, nodes in enumerate(self._pending.pop(commit.id, ())):
                own = min(left, nodes)
                self._counts[child][2] += own
                left -= own

    def forget(self, request_id: str) -> None:
        self._pending.pop(request_id, None)

    def read(self) -> list[tuple[float, float, float]]:
        return [(a, b, c) for a, b, c in self._counts]


class DeviceTally(Tally):
    """By row, without the host: what a row grew by since its last drafts, less one token, it accepted.

    In the steps that rows make by themselves they stay in their places, and this is exact. When rows change
    places the drafts of one step may be missed.
    """

    def place(self, rows: int, device: torch.device) -> None:
        self._counts = torch.zeros(3, self._count, dtype=torch.int64, device=device)
        self._spans = torch.zeros(rows, self._count, dtype=torch.int64, device=device)
        self._length = torch.zeros(rows, dtype=torch.int64, device=device)

    def proposed(self, step: StepView, spans: torch.Tensor) -> None:
        rows = spans.shape[0]
        length, before, old = step.committed_len, self._length[:rows], self._spans[:rows]
        gained = length - before - 1
        went_on = (gained >= 0) & (gained <= self._width)  # else it is another row
        gained = torch.where(went_on, gained, 0)
        earlier = old.cumsum(1) - old
        accepted = torch.minimum((gained[:, None] - earlier).clamp(min=0), old)
        self._counts += torch.stack(((spans > 0).sum(0), spans.sum(0), accepted.sum(0)))
        drafting = step.budget > 0  # others, such as those whose prompt is computed, are only passing by
        before.copy_(torch.where(drafting, length, before))
        kept = torch.where(went_on[:, None], 0, old)  # what was counted is not counted again
        old.copy_(torch.where(drafting[:, None], spans, kept))

    def read(self) -> list[tuple[float, float, float]]:
        return [(float(a), float(b), float(c)) for a, b, c in self._counts.T.tolist()]
