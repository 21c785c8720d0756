"""The loop that does not wait: the host launches a step before it has read the one before."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import torch

from ..contract import Drafts, Place
from ..kv import PoolExhausted
from ..runner.steady import SteadyOutput, SteadyStep
from .admission import Admission
from .drafting import Committed
from .in_flight import InFlight
from .loop import EngineCore, timed
from .output import DrawnTokens, RequestOutputState
from .pacing import Gaps, MeasuredCurve, Pacer
from .plan import StepPlan
from .request import NO_DRAFTS, Request, Status
from .seating import (
    ADMISSION,
    CATCH_UP,
    ENDING,
    FAILED,
    LOST,
    MEMORY,
    PROPOSER,
    REASONS,
    SEATS,
    UNDRAWABLE,
    WEIGHING,
    may_rest,
    why_looked_at,
    why_not_seated,
)
from .spans import Span
from .verification import RowOutcome

logger = logging.getLogger(__name__)


class OverlappedEngineCore(EngineCore):
    """Rows that only decode sit down and move on by themselves; others are computed beside them.

    In their seats, rows go from step to step on the device: drafts are verified, tokens drawn and drafts
    made from what the step before left there. The host launches step ``n + 1``, then reads what step ``n``
    drew, delivers it and ends who has met a stop; what was computed behind a stop is thrown away. It
    knows lengths only within bounds, and reserves slots for the longest.

    Requests that the host must look at between two steps (:mod:`.seating`) run in the plain order, in a
    forward of their own. Everybody stands up, after all that is under way was read, where something must be
    taken away from somebody, and where something went wrong. Each wait for the host is counted with its
    reason.
    """

    def __init__(self, *, steady: SteadyStep, admission: Admission, **parts: Any) -> None:
        super().__init__(**parts)
        self.steady, self._admission = steady, admission
        self._seated: list[Request | None] = []  # by seat; None: given up
        self._budgets: list[int] = []  # as the device knows them, by seat
        self._occupied: set[int] = set()  # seats that the device takes for occupied
        self._in_flight: list[InFlight] = []
        self._trouble: str | None = None  # what the host must see to before the next step
        self._fed = True  # whether the last launch fed the proposer
        self._last: InFlight | None = None  # the last launch, as long as its rows sit
        self._alone = False  # whether nothing but steps over the seats was computed since the last launch
        self._before: InFlight | None = None  # the last step that was read
        self._faults = 0  # drafts cut on the device, as far as counted
        self.metrics.count_waits(REASONS)
        needs = self.drafting.needs if self.drafting else None
        #: Why no request ever takes a seat; None: they may
        self.why_never: str | None = None
        if self.drafting is not None and self.verification.rule.weigh is not None:
            self.why_never = WEIGHING
        self._on_host = needs is not None and needs.place is Place.HOST
        #: A proposer on the host is fed what a step left on the device, so before the next one.
        self._fed_by_host = needs is not None and self._on_host and bool(needs.kv or needs.taps)
        self._names_requests = needs is not None and not self._on_host and not needs.graphs
        self._may_rest = self._pacer is not None and needs is not None and may_rest(needs)
        self.scheduler.rests = self._rests_for

    def step(self) -> list[RequestOutputState]:
        if self._may_all_have_ended():
            self._read(keep=0)
            self._finish_ended()
        if self._trouble is not None:
            self._in_plain_order(self._trouble)
        else:
            self._keep_seats_together()
            self._sit_down()
            self._serve_others()
            self._go_on()
        self._finish_ended()
        return self._hand_out()

    def prepare(self) -> None:
        """Record the steps' graphs, and time them for who chooses among them."""
        needs = self.drafting.needs if self.drafting else None
        captured = needs is not None and needs.place is Place.DEVICE and needs.graphs
        self.steady.capture(self._draft if captured else None, rests=self._may_rest)
        if self.steady.captured:
            logger.info(self.steady.graphs.report())
        if self._pacer is not None and self.steady.captured and self.why_never is None:
            fed, resting = self._agree((self.steady.measure(), self.steady.measure_resting()))
            self._pacer.whole.replace(MeasuredCurve(fed), drafting=captured)
            self._pacer.know_rest({rows: seconds / fed[rows, 1] for rows, seconds in resting.items()})
        else:
            super().prepare()

    def read_metrics(self) -> list[Any]:
        self._count_faults()
        return super().read_metrics()

    def drop_kv(self) -> None:
        self._settle()
        super().drop_kv()

    def close(self) -> None:
        self._in_flight.clear()
        super().close()
        self.steady.forget()

    def _may_all_have_ended(self) -> bool:
        """Whether no row may be left to compute: a step for nobody costs more than looking first."""
        behind = sum(flight.tokens for flight in self._in_flight)
        return bool(behind) and all(
            len(request.token_ids) + behind >= request.limit
            for request in self._seated
            if request is not None and self._alive(request)
        )

    # -- who sits, and who does not -------------------------------------------------------------
    def _keep_seats_together(self) -> None:
        """Let the rows that are left sit together again, where too many seats are empty."""
        while self._seated and not self._alive(self._seated[-1]):
            self._seated.pop()
        alive = sum(self._alive(request) for request in self._seated)
        # A proposer that is told who sits there is not shown empty seats; else half of them may be empty.
        fewest = len(self._seated) if self._names_requests else len(self._seated) // 2 + 1
        if self._seated and alive < fewest:
            self._settle()
            self.metrics.host_waits[SEATS].inc()

    def _sit_down(self) -> None:
        """Seat those that the host need not look at, in empty seats first."""
        if self.why_never is not None:
            return
        seated = self._sitting()
        coming = [
            request
            for request in self.scheduler.running
            if request not in seated and self._why_not_seated(request) is None
        ]
        if not coming:
            return
        empty = [row for row, request in enumerate(self._seated) if not self._alive(request)]
        rows = [*empty, *range(len(self._seated), len(self._seated) + len(coming))][: len(coming)]
        self._alone = False
        self._seated += [None] * (max(rows) + 1 - len(self._seated))
        for row, request in zip(rows, coming, strict=True):
            self._seated[row] = request
        budgets = self._budgets_now()
        self.steady.seats.seat(dict(zip(rows, coming, strict=True)), [budgets[row] for row in rows])
        self._budgets = []  # the next launch tells all of them

    def _why_not_seated(self, request: Request) -> str | None:
        needs = self.drafting.needs if self.drafting is not None and self._drafts else None
        return why_not_seated(request, needs)

    def _serve_others(self) -> None:
        """In the plain order, those without a seat, and those that wait; the seats' rows keep theirs."""
        seated = self._sitting()
        others = [request for request in self.scheduler.running if request not in seated]
        if not others and (not self.scheduler.may_admit or self._puts_off()):
            return
        why = ADMISSION
        if others:
            why = self.why_never or self._why_not_seated(others[0]) or ENDING
        try:
            plan = self.scheduler.schedule(apart=seated)
        except PoolExhausted:
            self._in_plain_order(MEMORY)
            return
        if not others:
            self._admission.let_in(time.perf_counter(), len(plan.rows))
        if plan.rows:
            self.metrics.host_waits[why].inc()
            self._run(plan)

    def _puts_off(self) -> bool:
        """Whether those who wait do so a little longer, for others to come in with them."""
        rows = sum(self._alive(request) for request in self._seated)
        if not (rows and self._admission.delays):
            return False
        waiting, full = self.scheduler.admissible()
        if full:  # others would not come in with them
            return False
        return self._agree(self._admission.puts_off(time.perf_counter(), waiting=waiting, rows=rows))

    def _go_on(self) -> None:
        """The next step of those in their seats."""
        if not any(self._alive(request) for request in self._seated):
            self._read(keep=0)
            self._admission.stood_up()
            return
        for row, request in enumerate(self._seated):
            if request is not None and not self._alive(request):
                self._seated[row] = None
        waking = self._pace_seats()
        if waking:
            self._in_plain_order(CATCH_UP, waking)
            return
        if not self._launch():
            self._in_plain_order(MEMORY)
            return
        draft = self._drafts_on_host and any(self._budgets)
        self._read(keep=0 if draft or (self._fed_by_host and self._drafts) else 1, draft=draft)

    def _run(self, plan: StepPlan) -> None:
        self._alone = False
        super()._run(plan)

    def _drafted_later(self, request: Request) -> bool:
        # Launched one by one, the kernels of a few drafts take longer than the whole step that is replayed
        # next.
        return self.steady.drafts and self.why_never is None and why_looked_at(request) is None

    def _in_plain_order(self, why: str, waking: Sequence[Request] = ()) -> None:
        """A step of everybody, after all that is under way was read; ``waking`` catch up in it."""
        self._settle(waking)
        self.metrics.host_waits[why].inc()
        self._run(self.scheduler.schedule())

    def _sitting(self) -> set[Request]:
        return {request for request in self._seated if request is not None and self._alive(request)}

    @staticmethod
    def _alive(request: Request | None) -> bool:
        return request is not None and request.status is Status.RUNNING

    @property
    def _pacer(self) -> Pacer | None:
        return None if self.drafting is None else self.drafting.policy.pacer

    @property
    def _drafts(self) -> bool:
        return self.drafting is not None and not self.drafting.proposer.quarantined

    @property
    def _drafts_on_host(self) -> bool:
        return self._on_host and self._drafts

    def _budgets_now(self) -> list[int]:
        """Most drafts of each seat."""
        drafting = self.drafting
        if drafting is None or not self._drafts:
            return [0] * len(self._seated)
        num_running = self.scheduler.num_running
        return [
            0 if request is None or request.undrafted else drafting.policy.budget(request, num_running)
            for request in self._seated
        ]

    @property
    def _rests(self) -> bool:
        """Whether the next step leaves the proposer out."""
        return self._may_rest and self._drafts and self._pacer is not None and not self._pacer.feeds

    def _rests_for(self, request: Request) -> bool:
        """Whether the proposer rests for ``request``, if it runs in a seat."""
        resting = self._may_rest and self._drafts and self._pacer is not None and self._pacer.resting
        return resting and self.why_never is None and why_looked_at(request) is None

    def _pace_seats(self) -> Sequence[Request]:
        """Choose the width of the next step, and who is to catch up before it."""
        if self._pacer is None or self.drafting is None or not self._drafts:
            return ()
        limit, num_running = self.drafting.policy.limit, self.scheduler.num_running
        sitting = [request for request in self._seated if request is not None]
        limits = [0 if request.undrafted else limit(request, num_running) for request in sitting]
        steady, rows = self.steady, len(self._seated)
        gaps = None
        if self._may_rest:
            gaps = Gaps([r.behind for r in sitting], [r.limit - len(r.token_ids) for r in sitting])
        self._pacer.alike(sitting, limits, steady.widths(rows), size=steady.bucket(rows), gaps=gaps)
        waking = set(self._pacer.waking)
        return [request for request in sitting if request in waking]

    def _fitting(self, budgets: Sequence[int]) -> int:
        """The narrowest step that has room for what the rows may bring."""
        most = max(budgets)
        if self._on_host:  # where the drafts are known
            most = max(
                min(len(request.drafts), budget)
                for request, budget in zip(self._seated, budgets, strict=True)
                if request is not None
            )
        return next(width for width in self.steady.widths(len(budgets)) if width >= most)

    # -- a step -------------------------------------------------------------------------------------
    def _launch(self) -> bool:
        """Enqueue a step; False if the pool has no slots for what it may commit."""
        seats, rests = self.steady.seats, self._rests
        live, budgets = self._seated, self._budgets_now()
        tokens = 1 + self._fitting(budgets)
        if not self._reserve(tokens):
            return False
        occupied = {row for row, request in enumerate(live) if request is not None}
        if budgets != self._budgets or occupied != self._occupied:
            self._budgets, self._occupied = budgets, occupied
            seats.set_budgets(budgets, [request is not None for request in live])
        seats.set_blocks([None if request is None else request.table.blocks for request in live])
        drafting = self._drafts and not self._on_host
        self._fed = not rests and not self._on_host and (drafting or self.steady.captured)
        span = Span(self.runner.device)
        try:
            if rests:
                output = self.steady.rest(len(live))
            else:
                output = self.steady.run(len(live), tokens, self._draft if drafting else None)
        except BaseException:
            self._trouble = LOST  # nobody knows how far the device came: the host's knowledge counts
            raise
        width = max(budgets) if self._on_host else tokens - 1
        flight = self._send_home(output, len(live), width, span, rests)
        self._in_flight.append(flight)
        for request in live:
            if rests and request is not None and request.own:
                request.rests = True
        self._admission.launched(flight.launched, alone=flight.follows)
        self._last, self._alone = flight, True
        self.metrics.steps.inc()
        return True

    def _reserve(self, tokens: int) -> bool:
        """Have blocks for the longest that each row may be behind this step."""
        behind = sum(flight.tokens for flight in self._in_flight)
        shape, reserve = self.steady.seats.shape, self.drafting.needs.reserve if self.drafting else 0
        scratch = max(shape.width, reserve) if shape.tree else reserve
        try:
            for request in self._seated:
                if request is not None:
                    longest = min(len(request.token_ids) + behind + tokens, request.limit)
                    # Nodes of a tree take more slots than its levels may add tokens.
                    request.table.ensure(longest + scratch)
        except PoolExhausted:
            return False
        return True

    def _send_home(self, output: SteadyOutput, rows: int, width: int, span: Span, rests: bool) -> InFlight:
        wanted = [output.results.report[:rows]]
        if self.steady.seats.shape.tree and (self._pacer is not None or self._fed_by_host):
            wanted.append(output.results.path[:rows])
        if wanted[0].device.type == "cuda":
            copies = [torch.empty(own.shape, dtype=own.dtype, pin_memory=True) for own in wanted]
            for copy, own in zip(copies, wanted, strict=True):
                copy.copy_(own, non_blocking=True)
        else:
            copies = [own.clone() for own in wanted]
        span.end()
        last = self._last
        drafted_for = set() if last is None else set(last.requests)
        most = 0 if last is None else min(width, last.width)
        return InFlight(
            requests=list(self._seated),
            tokens=output.tokens,
            report=copies[0],
            span=span,
            launched=time.perf_counter(),
            fed=self._fed,
            rests=rests,
            size=output.rows,
            width=width,
            # For who has just sat down none were made yet.
            offered=[
                min(most, budget) if request in drafted_for else 0
                for request, budget in zip(self._seated, self._budgets, strict=True)
            ],
            follows=self._alone,
            nodes=copies[1] if len(copies) > 1 else None,
            taps=output.taps,
        )

    def _read(self, keep: int, *, draft: bool = False) -> None:
        """Read what was drawn, but for the last ``keep`` steps, and deliver it.

        Args:
            draft: have a proposer on the host draft behind it; else it is only fed.
        """
        committed: dict[Request, Committed] = {}
        while len(self._in_flight) > keep:
            flight = self._in_flight.pop(0)
            if flight.span.done is not None:
                flight.span.done.synchronize()
            self.metrics.target_seconds.inc(flight.span.seconds() or 0.0)
            self._time(flight)
            outcomes = {
                place: outcome
                for place, (request, row) in enumerate(
                    zip(flight.requests, flight.report.tolist(), strict=True)
                )
                if (outcome := self._commit(request, flight, place, row)) is not None
            }
            for place, outcome in outcomes.items():
                request, before = outcome.request, committed.get(outcome.request)
                start = len(request.token_ids) - len(outcome.drawn.ids) - 1
                committed[request] = Committed(
                    request,
                    start if before is None else before.start,
                    place * flight.tokens,
                    outcome.nodes,
                    flight.taps,
                )
            self._deliver(list(outcomes.values()))
        if self._drafts_on_host and committed:
            self._draft_on_host(list(committed.values()), draft)
        for request in committed:
            self.scheduler.publish_blocks(request)

    def _time(self, flight: InFlight) -> None:
        """Learn what a step costs: from the end of the one before to its own."""
        before, self._before = self._before, flight
        if self._pacer is None or before is None or not flight.follows:
            return
        seconds = flight.launched - before.launched
        if flight.span.done is not None and before.span.done is not None:
            seconds = before.span.done.elapsed_time(flight.span.done) / 1e3
        if flight.rests:
            self._pacer.rested(flight.size, self._agree(seconds))
        else:
            self._pacer.whole.observe(flight.size, 1 + flight.width, self._agree(seconds))

    def _commit(
        self, request: Request | None, flight: InFlight, place: int, row: Sequence[int]
    ) -> RowOutcome | None:
        """Take what the device reports of the row in seat ``place``: count, accepted, drafted, tokens."""
        count, accepted, drafted = row[:3]
        if request is None or request.status is not Status.RUNNING or not count:
            return None
        if count < 0:  # the plain order computes it again and says why
            request.undrafted = request.undrafted or drafted > 0
            self._trouble = UNDRAWABLE
            return None
        tokens, before = row[3 : 3 + count], len(request.token_ids)
        request.commit(tokens)
        request.computed = len(request.token_ids) - 1
        if flight.fed:  # what was fed behind a gap is no true entry
            request.own = [len(request.token_ids) if own == before else own for own in request.own]
        request.drafts = NO_DRAFTS
        nodes: Sequence[int] = range(accepted)
        if flight.nodes is not None:
            nodes = [column - 1 for column in flight.nodes[place].tolist() if column][:accepted]
        drawn = DrawnTokens(tokens, min(accepted, count))
        offered = flight.offered[place]
        return RowOutcome(request, drawn, drafted=drafted, nodes=nodes, offered=offered)

    # -- drafting -------------------------------------------------------------------------------------
    def _draft(self, output: SteadyOutput) -> None:
        """Let the proposer fill the seats' drafts on the device."""
        assert self.drafting is not None
        requests = [*self._seated, *[None] * (output.rows - len(self._seated))]
        seats, rows = self.steady.seats, slice(output.rows)
        with torch.inference_mode():
            seats.drafts.lens.zero_()
            if seats.shape.tree:
                seats.drafts.parents.copy_(seats.chain)
            drafts = Drafts(
                ids=seats.drafts.ids[rows],
                lens=seats.drafts.lens[rows],
                parents=seats.drafts.parents[rows],
                score=seats.drafts.score[rows],
            )
            if not self.drafting.propose_static(output, seats, requests, drafts):
                seats.drafts.lens.zero_()
                self._fed, self._trouble = False, FAILED

    def _draft_on_host(self, committed: Sequence[Committed], draft: bool) -> None:
        """Tell the proposer what each request committed; if it is to draft, the device waits for that."""
        assert self.drafting is not None
        with timed(self.metrics.propose_seconds):
            done = self.drafting.propose_on_host(committed, self.scheduler.num_running, draft=draft)
        if self._fed_by_host and not done:
            self.drafting.heal(own.request for own in committed)
            self._trouble = FAILED
        if draft:
            self.metrics.host_waits[PROPOSER].inc()
            self.steady.seats.put_drafts(self._seated)

    # -- back to the plain order ------------------------------------------------------------------------
    def _settle(self, waking: Sequence[Request] = ()) -> None:
        """Read all that is under way and let everybody stand up, with the drafts they have."""
        self._read(keep=0)
        self._finish_ended()
        if waking and self.drafting is not None:
            self.drafting.wake(waking)
        here = {row: r for row, r in enumerate(self._seated) if r is not None and self._alive(r)}
        if here and self.drafting and not self._on_host and self._trouble != LOST:
            self._count_faults()
            if self._trouble == FAILED:
                self.drafting.heal(here.values())
            self.drafting.take_from_seats(self.steady.seats.drafts, here, self.scheduler.num_running)
        if self.drafting is not None and self.drafting.proposer.quarantined:
            self.scheduler.forget_draft_layers()
        self._seated, self._budgets, self._trouble = [], [], None
        self._last, self._alone = None, False
        self._admission.stood_up()

    def _count_faults(self) -> None:
        if self.drafting:
            faults = int(self.steady.seats.faults)
            self.metrics.drafts_dropped.inc(faults - self._faults)
            self._faults = faults
