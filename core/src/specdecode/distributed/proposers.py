"""Proposers that run on rank 0 alone: their drafts are broadcast."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..contract import (
    Bucket,
    Commit,
    Drafts,
    Needs,
    Place,
    Proposer,
    Ranks,
    RequestInfo,
    Resources,
    SpecdecodeError,
    StepView,
    TargetHandle,
    TargetUpdate,
    Unsupported,
)
from ..contract.errors import FAULTS
from .group import Group


def check_ranks(needs: Needs, method: str, ranks: int) -> None:
    """Raise Unsupported for a method that rank 0 cannot run alone."""
    if ranks > 1 and needs.ranks is Ranks.LEADER and needs.modules:
        raise Unsupported(
            f"{method} runs on rank 0 alone (Needs.ranks) and borrows {', '.join(sorted(needs.modules))} of "
            f"the target, which tensor_parallel_size={ranks} shares out: a method that computes alike on all "
            "ranks declares ranks=ALL"
        )


class LeaderFailed(SpecdecodeError):
    """What a method raises on the other ranks when it raised on rank 0."""


class LeaderProposer(Proposer):
    """A method that is run by rank 0 and heard by the others, whose own copy stays idle.

    Whatever it draws on (a clock, a generator, another machine), all ranks have the same drafts.
    """

    def __init__(self, proposer: Proposer, needs: Needs, group: Group) -> None:
        self._own = proposer if group.rank == 0 else None
        self._on_host = needs.place is Place.HOST
        self._group = group

    def load(self, target: TargetHandle) -> None:
        self._led(lambda own: own.load(target))

    def bind(self, resources: Resources) -> None:
        """The others measure along: what a target's step costs takes all ranks."""
        agree, costs = self._group.agree, resources.costs
        if self._own is None:
            while (points := agree(None)) is not None:
                assert costs is not None
                costs(points)
        else:

            def measured(points: Sequence[tuple[int, int]]) -> Any:
                assert costs is not None
                agree(list(points))
                return costs(points)

            self._own.bind(_with_costs(resources, None if costs is None else measured))
            agree(None)
        self.most = agree(None if self._own is None else self._own.most)

    def warm(
        self, buckets: Sequence[Bucket], capture: Callable[[Callable[[], Any], Bucket], Callable[[], Any]]
    ) -> None:
        self._led(lambda own: own.warm(buckets, capture))

    def on_add(self, request: RequestInfo) -> None:
        self._led(lambda own: own.on_add(request))

    def on_commit(self, commits: Sequence[Commit]) -> None:
        self._led(lambda own: own.on_commit(commits))

    def on_preempt(self, request_id: str) -> None:
        self._led(lambda own: own.on_preempt(request_id))

    def on_finish(self, request_id: str, reason: str) -> None:
        self._led(lambda own: own.on_finish(request_id, reason))

    def on_target_updated(self, update: TargetUpdate) -> None:
        self._led(lambda own: own.on_target_updated(update))

    def propose(self, step: StepView, out: Drafts) -> None:
        self._led(lambda own: own.propose(step, out))
        for buffer in (out.ids, out.lens, out.parents, out.score, out.probs):
            if buffer is None:
                continue
            if self._on_host:
                buffer[...] = self._group.agree(buffer)
            else:
                self._group.broadcast(buffer)

    def metrics(self) -> Mapping[str, float]:
        return {} if self._own is None else self._own.metrics()

    def close(self) -> None:
        if self._own is not None:
            self._own.close()

    def _led(self, call: Callable[[Proposer], None]) -> None:
        """Rank 0 calls; if that raises, it raises on all."""
        error: BaseException | None = None
        if self._own is not None:
            try:
                call(self._own)
            except FAULTS as raised:
                error = raised
        told = self._group.agree(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        if told is not None:
            raise LeaderFailed(f"on rank 0: {told}")


def _with_costs(resources: Resources, costs: Callable[..., Any] | None) -> Resources:
    return Resources(
        kv=resources.kv,
        block_size=resources.block_size,
        max_num_seqs=resources.max_num_seqs,
        max_model_len=resources.max_model_len,
        costs=costs,
    )
