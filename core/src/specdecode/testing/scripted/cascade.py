"""Proposers made of proposers: for each row the first child that drafts wins."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import torch

from ...contract import (
    Bucket,
    Commit,
    Drafts,
    Needs,
    Proposer,
    RequestInfo,
    Resources,
    StepView,
    TargetHandle,
)
from .wrapping import Capture


class CascadeProposer(Proposer):
    """Children are all fed, and asked in turn with the budgets that their elders left."""

    def __init__(self, children: Sequence[Proposer], needs: Needs) -> None:
        self._children = tuple(children)
        self._needs = needs

    def load(self, target: TargetHandle) -> None:
        for child in self._children:
            child.load(target)

    def bind(self, resources: Resources) -> None:
        start = 0
        for child, needs in zip(self._children, self._needs.children, strict=True):
            end = start + len(needs.kv)
            child.bind(attrs.evolve(resources, kv=resources.kv[start:end]))
            start = end

    def warm(self, buckets: Sequence[Bucket], capture: Capture) -> None:
        for child in self._children:
            child.warm(buckets, capture)

    def on_add(self, request: RequestInfo) -> None:
        for child in self._children:
            child.on_add(request)

    def on_commit(self, commits: Sequence[Commit]) -> None:
        for child in self._children:
            child.on_commit(commits)

    def on_preempt(self, request_id: str) -> None:
        for child in self._children:
            child.on_preempt(request_id)

    def on_finish(self, request_id: str, reason: str) -> None:
        for child in self._children:
            child.on_finish(request_id, reason)

    def close(self) -> None:
        for child in self._children:
            child.close()

    def propose(self, step: StepView, out: Drafts) -> None:
        left = step.budget
        left = left.copy() if isinstance(left, np.ndarray) else left.clone()
        names = ("ids", "lens", "parents", "score") + (() if out.probs is None else ("probs",))
        mine = {name: torch.as_tensor(getattr(out, name)) for name in names}
        for index, child in enumerate(self._children):
            view, drafts = step.for_child(index, left)
            child.propose(view, drafts)
            theirs = {name: torch.as_tensor(getattr(drafts, name)).to(mine[name].device) for name in mine}
            wins = (mine["lens"] == 0) & (theirs["lens"] > 0)
            width = theirs["ids"].shape[1]
            for name, buffer in mine.items():
                own = buffer if buffer.dim() == 1 else buffer[:, :width]
                own.copy_(torch.where(wins.view(-1, *[1] * (buffer.dim() - 1)), theirs[name], own))
            torch.as_tensor(left)[wins.to(torch.as_tensor(left).device)] = 0
