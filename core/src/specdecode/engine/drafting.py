"""Feeds the proposer after each step and takes its drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import attrs
import torch

from ..contract import Commit, Drafts, Needs, Proposer, RequestInfo, Shape, StepView, Tap
from ..runner.inputs import SlotMap
from ..runner.runner import ModelRunner, TargetOutput
from ..runner.seats import Seats
from ..runner.steady import SteadyOutput
from ..sampling.batch import SamplingBatch
from ..sampling.laws import law, laws_in_order
from ..sampling.sampler import rank
from ..sampling.streams import Stream
from ..verify.base import Rule
from .control import DraftPolicy
from .draws import sample_row
from .feed import FedRow, Feed, buffers_of, make_drafts, replaced
from .guard import GuardedProposer
from .metrics import EngineMetrics
from .pacing import Verified
from .plan import RowPlan, StepPlan
from .request import Request, Status
from .static_feed import StaticFeed
from .taking import take_drafts
from .verification import RowOutcome


@attrs.frozen(eq=False)
class Committed:
    """What steps over the seats committed of a request."""

    request: Request
    start: int  #: the position that the first of them computed first
    first: int  #: where its row begins, of all tokens of the last one
    nodes: Sequence[int]  #: accepted of its drafts, in path order
    taps: Mapping[Tap, torch.Tensor]  #: the last step's, of all rows


class Drafting:
    """One proposer's life in the engine. Also the scheduler's :class:`Lifecycle`."""

    def __init__(
        self,
        proposer: GuardedProposer,
        needs: Needs,
        policy: DraftPolicy,
        runner: ModelRunner,
        vocab_size: int,
        metrics: EngineMetrics,
        rule: Rule,
    ) -> None:
        self.proposer = proposer
        self.needs = needs
        self._rule = rule
        self.policy = policy
        self._runner = runner
        self._vocab_size = vocab_size
        self._metrics = metrics

    # -- lifecycle ------------------------------------------------------------------------------
    def added(self, request: Request, *, resumed: bool) -> None:
        if request.background:
            return
        info = RequestInfo(
            id=request.id,
            namespace=request.namespace,
            token_ids=tuple(request.token_ids),
            prompt_len=len(request.prompt_ids),
            params=request.params,
            resumed=resumed,
        )
        self.proposer.on_add(info)

    def preempted(self, request: Request) -> None:
        if not request.background:
            self.proposer.on_preempt(request.id)

    def committed(self, commits: Sequence[Commit]) -> None:
        if commits:
            self.proposer.on_commit(commits)

    def finished(self, request: Request, reason: str) -> None:
        if self.policy.pacer is not None:
            self.policy.pacer.forget(request)
        if request.admitted:
            self.proposer.on_finish(request.id, reason)

    # -- how much -------------------------------------------------------------------------------
    def verified(self, outcomes: Sequence[RowOutcome]) -> None:
        """Learn from what a step made of its drafts; before outputs are cut at their stops."""
        pacer = self.policy.pacer
        if pacer is None:
            return
        step = []
        for outcome in outcomes:
            request = outcome.request
            if request.background or not outcome.drawn.ids:
                continue
            offered = pacer.length(request) if outcome.offered is None else outcome.offered
            # As it was when it was drafted for.
            room = request.limit - (len(request.token_ids) - len(outcome.drawn.ids)) - 1
            offered = max(outcome.drafted, min(offered, room, self.needs.width))
            step.append(Verified(request, offered, outcome.drafted, outcome.nodes, outcome.scores))
        pacer.verified(step)

    def pace(self, requests: Iterable[Request], num_running: int) -> None:
        """Choose how many drafts each of ``requests`` may have next, where each has a length of its own."""
        pacer = self.policy.pacer
        if pacer is None:
            return
        rows = _decoding(requests)
        if rows:
            most = [0 if row.rests else min(self.policy.limit(row, num_running), row.room) for row in rows]
            pacer.each(rows, most)

    # -- a step ---------------------------------------------------------------------------------
    @torch.inference_mode()
    def propose(
        self,
        plan: StepPlan,
        output: TargetOutput,
        accepted: Sequence[Sequence[int]],
        num_running: int,
        *,
        later: Callable[[Request], bool],
    ) -> None:
        """Feed this step's committed tokens and set the drafts of the next one.

        Rows in the background are left out, those for which the proposer rests, and rows that have nothing to
        feed: those whose draw failed.

        Args:
            accepted: for each row of ``plan`` its accepted draft nodes, in path order.
            later: whether a request gets no drafts from this step.
        """

        def draft(proposer: Proposer) -> None:
            fed = {
                place: self._fed_row(row, offset, nodes, num_running, later)
                for place, (row, offset, nodes) in enumerate(
                    zip(plan.rows, output.batch.offsets, accepted, strict=True)
                )
                if not (row.request.background or row.request.rests)
            }
            fed = {place: row for place, row in fed.items() if row.start < row.end}
            if not fed:
                return
            rows = list(fed.values())
            drafts = make_drafts(self.needs, len(rows), self._vocab_size, self._runner.device)
            _fill(proposer, StepView(self.needs, self._feed(fed, output)), drafts)
            self._advance_entries(rows)
            self._take(drafts, rows)
            self._choose(rows)

        if not self.proposer.propose(draft) and not self.proposer.quarantined:
            self.heal(row.request for row in plan.rows)

    def propose_static(
        self,
        output: SteadyOutput,
        seats: Seats,
        requests: Sequence[Request | None],
        drafts: Drafts,
    ) -> bool:
        """Have ``drafts`` filled on the device, after a step over the seats; False if that failed."""
        feed = StaticFeed(
            output,
            seats,
            kv=self.needs.kv,
            max_slots=self._runner.max_slots,
            requests=requests,
            check=self._check_writes if self._runner.check_writes else None,
        )
        return self.proposer.propose(lambda proposer: _fill(proposer, StepView(self.needs, feed), drafts))

    @torch.inference_mode()
    def propose_on_host(self, committed: Sequence[Committed], num_running: int, *, draft: bool) -> bool:
        """Feed a proposer on the host what each request just committed; False if that failed.

        Args:
            draft: take its drafts; else it is told that there is no room for any.
        """
        rows = [
            self._fed_row(
                RowPlan(own.request, own.start, 1),
                own.first,
                own.nodes,
                num_running,
                later=lambda request: not draft,
            )
            for own in committed
            if own.request.status is not Status.FINISHED
        ]
        rows = [row for row in rows if row.start < row.end]

        def propose(proposer: Proposer) -> None:
            slots = self._runner.slots_of([row.plan for row in rows]) if self.needs.kv else None
            taps = dict(committed[-1].taps)
            drafts = make_drafts(self.needs, len(rows), self._vocab_size, self._runner.device)
            _fill(proposer, StepView(self.needs, self._feed_of(rows, slots, taps)), drafts)
            self._advance_entries(rows)
            self._take(drafts, rows)

        return self.proposer.propose(propose) if rows else True

    def take_from_seats(self, drafts: Drafts, requests: Mapping[int, Request], num_running: int) -> None:
        """Bring the drafts that were made on the device, by seat, to ``requests``."""
        seats = list(requests)
        ids, lens, parents = (part[seats] for part in (drafts.ids, drafts.lens, drafts.parents))
        own = Drafts(ids=ids, lens=lens, parents=parents, score=None)
        allowed = {request: self._allowance(request, num_running) for request in requests.values()}
        width = self.needs.width  # what they might have had when they were made is not known any more
        rows = [
            FedRow(RowPlan(request, request.computed, 1), 0, 0, width, room, [])
            for request, (_, room) in allowed.items()
        ]
        self._take(own, rows)
        for request, (budget, _) in allowed.items():
            request.drafts = request.drafts.first(budget)

    def _choose(self, rows: Sequence[FedRow]) -> None:
        """Leave out what is not worth its place, by the scores; never where probabilities are weighed."""
        pacer = self.policy.pacer
        requests = _decoding(row.request for row in rows)
        if pacer is None or not any(request.drafts.scores for request in requests):
            return
        kept = pacer.keep(requests, [request.drafts.scores for request in requests])
        for request, count in zip(requests, kept, strict=True):
            request.drafts = request.drafts.first(count)

    def _take(self, drafts: Drafts, rows: Sequence[FedRow]) -> None:
        faults = take_drafts(
            drafts,
            rows,
            self._vocab_size,
            chain=self.needs.shape is Shape.CHAIN,
            weighed=self._rule.weigh is not None,
            scored=self.policy.pacer is not None and self._rule.weigh is None,
        )
        self._metrics.drafts_dropped.inc(faults)

    def _feed(self, fed: Mapping[int, FedRow], output: TargetOutput) -> Feed:
        """``fed``: place in the plan -> row."""
        return self._feed_of(list(fed.values()), output.batch.slots.select(list(fed)), output.taps)

    def _feed_of(self, rows: Sequence[FedRow], slots: SlotMap | None, taps: dict[Tap, torch.Tensor]) -> Feed:
        return Feed(
            rows,
            kv=self.needs.kv,
            slots=slots,
            taps=taps,
            vocab_size=self._vocab_size,
            sampler=self._sample,
            laws=self._laws,
            check=self._check_writes if self._runner.check_writes else None,
            device=self._runner.device,
            max_slots=self._runner.max_slots,
        )

    def _fed_row(
        self,
        row: RowPlan,
        offset: int,
        accepted: Sequence[int],
        num_running: int,
        later: Callable[[Request], bool],
    ) -> FedRow:
        """What of a row is fed, and how much it may draft.

        Without taps entries are made from ids alone, so the feed starts where they end and can make
        up for any gap. With taps an entry wants the hidden state of the token before it, so the feed
        is what this step computed.
        """
        request, needs = row.request, self.needs
        end = request.computed + 1
        if needs.kv and not needs.taps:
            start = min(request.own)
            end = min(end, start + row.new + len(accepted) + row.catch_up + 1)
        else:
            start = row.start + 1 if row.start else 0
        slots = request.table.capacity >= (len(request.token_ids) + needs.reserve if needs.kv else 0)
        whole = end == request.computed + 1
        drafts = slots and whole and not later(request)
        budget, room = self._allowance(request, num_running) if drafts else (0, 0)
        drafts_start = offset + row.new
        hidden = [*range(offset, drafts_start), *(drafts_start + node for node in accepted)]
        return FedRow(row, start, end, budget, room, hidden)

    def _allowance(self, request: Request, num_running: int) -> tuple[int, int]:
        """Budget and room of a request: most drafts, most levels."""
        if request.status is not Status.RUNNING or request.todo != 1:  # ended, or its prompt is unfinished
            return 0, 0
        room = min(self.needs.depth, request.room)
        budget = self.policy.budget(request, num_running) if room else 0
        return min(budget, room) if self.needs.shape is Shape.CHAIN else budget, room

    def _sample(
        self, logits: torch.Tensor, requests: list[Request], positions: list[int], k: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return rank(logits, self._drafted(logits, requests, positions), k)

    def _laws(
        self, logits: torch.Tensor, requests: list[Request], positions: list[int], ids: torch.Tensor
    ) -> torch.Tensor:
        return laws_in_order(law(logits, self._drafted(logits, requests, positions)), torch.as_tensor(ids))

    def _drafted(self, logits: torch.Tensor, requests: list[Request], positions: list[int]) -> SamplingBatch:
        draws = [
            attrs.evolve(
                sample_row(request, position),
                stream=self._rule.stream(Stream.DRAFT, len(request.token_ids)),
            )
            for request, position in zip(requests, positions, strict=True)
        ]
        return SamplingBatch.build(draws, self._vocab_size, logits.device)

    def _check_writes(self, write_slots: torch.Tensor) -> None:
        self._runner.assert_writable(write_slots, draft=True)

    def _advance_entries(self, rows: Sequence[FedRow]) -> None:
        for row in rows:
            own = row.request.own
            for spec, length in enumerate(own):
                if row.start <= length:
                    own[spec] = max(length, row.end)

    def wake(self, requests: Iterable[Request]) -> None:
        """Feed ``requests`` again: what they are behind is made up for in the plain order."""
        woken = [request for request in requests if request.rests and request.status is Status.RUNNING]
        for request in woken:
            request.wake()
        self.heal(woken)

    def heal(self, requests: Iterable[Request]) -> None:
        """After a failed feed with taps, have the target compute those positions again.

        Its own KV is true already and is not written a second time.
        """
        if not (self.needs.kv and self.needs.taps):
            return
        for request in requests:
            if request.background or request.rests or request.status is not Status.RUNNING:
                continue
            if min(request.own) < request.computed + 1:
                request.target_floor = max(request.target_floor, request.computed)
                request.computed = max(0, min(request.own) - 1)


def _fill(proposer: Proposer, step: StepView, drafts: Drafts) -> None:
    """Have ``drafts`` filled in place: what reads them, on the device too, has the buffers core made."""
    given = buffers_of(drafts)
    proposer.propose(step, drafts)
    if foreign := replaced(drafts, given):
        names = ", ".join(f"out.{name}" for name in foreign)
        raise TypeError(
            f"propose put objects of its own in the place of {names}: write into core's buffers, "
            f"out.{foreign[0]}[...] = ..."
        )


def _decoding(requests: Iterable[Request]) -> list[Request]:
    """Those whose next step verifies drafts, if they have any."""
    return [r for r in requests if r.status is Status.RUNNING and r.todo == 1 and not r.background]
