"""The children of a combination: told of everything, fed in each step, and asked for drafts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
from specdecode.contract import (
    Bucket,
    BuildContext,
    Commit,
    Drafts,
    Needs,
    Place,
    Proposer,
    RequestInfo,
    Resources,
    StepView,
    TargetHandle,
    TargetUpdate,
)

from .buffers import Rows, emptied
from .planning import Choice, build_all
from .tally import DeviceTally, HostTally, Tally

_log = logging.getLogger(__name__)

#: A child that raises so often in a row is not asked again, as core has it for all methods.
FAILURES = 5


@attrs.define(eq=False)
class Child:
    """One of the methods."""

    proposer: Proposer
    needs: Needs
    label: str  #: in metrics
    failures: int = 0
    in_a_row: int = 0

    @property
    def dropped(self) -> bool:
        return self.in_a_row >= FAILURES


class Team:
    """Children in order, and what their drafts came to.

    A child without draft layers that raises in ``propose`` costs its own drafts of that step; after five
    times in a row it is not asked again. One with draft layers has missed its feed: that is raised, so that
    core makes up for it, and costs the drafts of all. ``strict`` raises either. What a hook raises is raised
    once every child was told.
    """

    def __init__(self, children: Sequence[Child], needs: Needs, *, strict: bool) -> None:
        self.children = tuple(children)
        self.needs = needs
        self._strict = strict
        kind = HostTally if needs.place is Place.HOST else DeviceTally
        self.tally: Tally = kind(len(self.children), needs.width)

    @classmethod
    def of(cls, choices: Sequence[Choice], context: BuildContext) -> Team:
        built = build_all(choices, context)
        children = [
            Child(proposer, needs, f"{index}.{choice.name}")
            for index, (proposer, needs, choice) in enumerate(
                zip(built, context.needs.children, choices, strict=True)
            )
        ]
        return cls(children, context.needs, strict=context.strict)

    def __len__(self) -> int:
        return len(self.children)

    def ask(self, step: StepView, index: int, budget: Any = None, *, after: Drafts | None = None) -> Rows:
        """Feed child ``index`` and have it draft; what it gives, where the combination works.

        Args:
            budget, after: see :meth:`StepView.for_child`.
        """
        child = self.children[index]
        view, drafts = step.for_child(index, budget, after=after)
        if not child.dropped:
            try:
                child.proposer.propose(view, drafts)
                child.in_a_row = 0
            except Exception:
                if self._strict or child.needs.kv:
                    raise
                emptied(drafts)
                self._failed(child)
        return Rows.of(drafts, step.committed_len)

    def _failed(self, child: Child) -> None:
        child.failures += 1
        child.in_a_row += 1
        if child.in_a_row == 1:
            _log.exception("proposers[%s] failed; in this step it has no drafts", child.label)
        if child.dropped:
            _log.error(
                "proposers[%s] failed %d times in a row and is not asked again; the others go on",
                child.label,
                child.in_a_row,
            )

    def tell(self, what: Callable[[Proposer], Any]) -> None:
        """Call ``what`` for each child, then raise what the first of those that failed had raised."""
        raised: list[Exception] = []
        for child in self.children:
            try:
                what(child.proposer)
            except Exception as error:
                raised.append(error)
        if raised:
            raise raised[0]

    def metrics_of(self, child: Child) -> dict[str, float]:
        """What the child counts itself; none if it raises, so that those of the others are told."""
        try:
            return dict(child.proposer.metrics())
        except Exception:
            if self._strict:
                raise
            return {}


class Combination(Proposer):
    """A proposer made of a team; a subclass says how it drafts."""

    def __init__(self, team: Team) -> None:
        self._team = team

    def load(self, target: TargetHandle) -> None:
        self._device = target.device
        for child in self._team.children:
            child.proposer.load(target)

    def bind(self, resources: Resources) -> None:
        self._team.tally.place(resources.max_num_seqs, self._device)
        start = 0
        for child in self._team.children:
            end = start + len(child.needs.kv)
            child.proposer.bind(attrs.evolve(resources, kv=resources.kv[start:end]))
            start = end

    def warm(
        self, buckets: Sequence[Bucket], capture: Callable[[Callable[[], Any], Bucket], Callable[[], Any]]
    ) -> None:
        for child in self._team.children:
            child.proposer.warm(buckets, capture)

    def on_add(self, request: RequestInfo) -> None:
        self._team.tell(lambda proposer: proposer.on_add(request))

    def on_commit(self, commits: Sequence[Commit]) -> None:
        self._team.tally.committed(commits)
        self._team.tell(lambda proposer: proposer.on_commit(commits))

    def on_preempt(self, request_id: str) -> None:
        self._team.tally.forget(request_id)
        self._team.tell(lambda proposer: proposer.on_preempt(request_id))

    def on_finish(self, request_id: str, reason: str) -> None:
        self._team.tally.forget(request_id)
        self._team.tell(lambda proposer: proposer.on_finish(request_id, reason))

    def on_target_updated(self, update: TargetUpdate) -> None:
        self._team.tell(lambda proposer: proposer.on_target_updated(update))

    def metrics(self) -> Mapping[str, float]:
        """Of each child ``<index>.<method>.``: what it counts itself, and what became of its drafts."""
        found: dict[str, float] = {}
        counts = self._team.tally.read()
        for child, (drafts, drafted, accepted) in zip(self._team.children, counts, strict=True):
            own = self._team.metrics_of(child) | {
                "drafts": drafts,
                "draft_tokens": drafted,
                "accepted_tokens": accepted,
                "failures": child.failures,
            }
            found |= {f"{child.label}.{name}": float(value) for name, value in own.items()}
        return found

    def close(self) -> None:
        self._team.tell(lambda proposer: proposer.close())
