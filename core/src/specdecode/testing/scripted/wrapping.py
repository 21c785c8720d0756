"""Proposers around another proposer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ...contract import (
    Bucket,
    BuildContext,
    Commit,
    Drafts,
    Needs,
    PlanContext,
    Proposer,
    RequestInfo,
    Resources,
    StepView,
    TargetHandle,
    TargetUpdate,
)

#: What ``Proposer.warm`` is given to record with.
Capture = Callable[[Callable[[], Any], Bucket], Callable[[], Any]]


class WrappingProposer(Proposer):
    """Passes every call on to ``inner``; a subclass changes what it must."""

    def __init__(self, inner: Proposer) -> None:
        self.inner = inner

    def load(self, target: TargetHandle) -> None:
        self.inner.load(target)

    def bind(self, resources: Resources) -> None:
        self.inner.bind(resources)
        self.most = self.inner.most

    def warm(self, buckets: Sequence[Bucket], capture: Capture) -> None:
        self.inner.warm(buckets, capture)

    def on_add(self, request: RequestInfo) -> None:
        self.inner.on_add(request)

    def on_commit(self, commits: Sequence[Commit]) -> None:
        self.inner.on_commit(commits)

    def on_preempt(self, request_id: str) -> None:
        self.inner.on_preempt(request_id)

    def on_finish(self, request_id: str, reason: str) -> None:
        self.inner.on_finish(request_id, reason)

    def on_target_updated(self, update: TargetUpdate) -> None:
        self.inner.on_target_updated(update)

    def propose(self, step: StepView, out: Drafts) -> None:
        """Ask the inner proposer, as a child sees the step, and hand on what it drafts."""
        view, drafts = step.for_child(0)
        self.inner.propose(view, drafts)
        width = out.ids.shape[1]  # less than the inner's own where it says ``most``
        out.lens[:] = drafts.lens
        out.ids[:], out.parents[:] = drafts.ids[:, :width], drafts.parents[:, :width]
        if out.probs is not None:
            out.probs[:] = drafts.probs[:, :width]

    def metrics(self) -> Mapping[str, float]:
        return self.inner.metrics()

    def close(self) -> None:
        self.inner.close()


def split_method(mapping: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """``{"method": m, **rest}`` as ``m, rest``."""
    rest = dict(mapping)
    return rest.pop("method"), rest


def union_of(mappings: Iterable[Mapping[str, Any]], ctx: PlanContext) -> Needs:
    """Needs of a proposer made of those that ``mappings`` name."""
    return Needs.union(*(ctx.needs_of(*split_method(mapping)) for mapping in mappings))


def build(mapping: Mapping[str, Any], ctx: BuildContext) -> Proposer:
    """The proposer that ``mapping`` names."""
    return ctx.build(*split_method(mapping))
