"""Chooses what the next step computes. One token budget, no prefill or decode phase; knows no torch.

Rows with a few tokens left to compute (a decode step and its drafts) and rows with many (a chunk of
a prompt) are the same thing here: committed tokens whose KV is missing.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Collection
from itertools import count, islice
from typing import Protocol

import attrs

from ..kv import BlockPool, PoolExhausted
from ..lora.slots import AdapterLost, AdapterSlots
from .plan import RowPlan, StepPlan
from .request import NO_DRAFTS, Request, Status


class Lifecycle(Protocol):
    """Told of admissions and preemptions at the moment they happen."""

    def added(self, request: Request, *, resumed: bool) -> None: ...
    def preempted(self, request: Request) -> None: ...


@attrs.frozen(kw_only=True)
class SchedulerConfig:
    max_num_seqs: int
    max_num_batched_tokens: int
    chunked_prefill: bool = True
    prefix_caching: bool = True
    draft_layers: bool = False  #: the proposer keeps KV of its own on the block tables
    tapped: bool = False  #: its entries are made from target hidden states
    draft_reserve: int = 0  #: slots wanted for drafting at the end of a step


class Scheduler:
    """First come, first served within a priority; a full pool takes from the drafts, then from the last."""

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        lifecycle: Lifecycle,
        num_kv_specs: int = 0,
        adapters: AdapterSlots | None = None,
    ) -> None:
        """``adapters``: where requests' adapters are; None: no request has one."""
        self.config = config
        self.pool = pool
        self.waiting: deque[Request] = deque()  # both in the order of their turns, the background's behind
        self.running: list[Request] = []
        self.lost: list[tuple[Request, str]] = []  #: that cannot run, and why: whoever schedules ends them
        self.num_preemptions = 0
        self.adapters = adapters
        #: Whether the proposer rests for a request that is admitted: then it may be without true entries.
        self.rests: Callable[[Request], bool] = lambda request: False
        self._lifecycle = lifecycle
        self._num_kv_specs = num_kv_specs
        self._arrivals = count()
        self._refused: tuple[Request, int] | None = None  # at the head of the queue, and the blocks free then

    def add(self, request: Request) -> None:
        request.attach(self.pool, self._num_kv_specs)
        request.arrival = next(self._arrivals)
        insort(self.waiting, request, key=_turn)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def num_running(self) -> int:
        """Requests that run, without those in the background."""
        return sum(not request.background for request in self.running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait, without those in the background."""
        return sum(not request.background for request in self.waiting)

    @property
    def may_admit(self) -> bool:
        """Whether planning a step may admit a request: one waits that was not refused for want of blocks."""
        if len(self.running) >= self.config.max_num_seqs:
            return False
        head = self._next()
        if head is None:
            return False
        refused, free = self._refused or (None, 0)
        return head is not refused or self.pool.num_free > free

    def admissible(self) -> tuple[int, bool]:
        """How many requests wait that a step has room for, blocks aside; and whether their tokens fill it."""
        most = min(len(self.waiting), self.config.max_num_seqs - len(self.running))
        tokens = sum(len(request.token_ids) for request in islice(self.waiting, most))
        return most, tokens >= self.config.max_num_batched_tokens

    # -- planning -------------------------------------------------------------------------------
    def schedule(self, apart: Collection[Request] = ()) -> StepPlan:
        """The next step; it may preempt.

        Args:
            apart: running requests that are computed elsewhere and keep what they have.

        Raises:
            PoolExhausted: it takes a preemption, and there are requests apart, which may be the ones to
                give way. Nothing has changed.
        """
        plan, left = StepPlan(), self.config.max_num_batched_tokens
        active = [
            request
            for request in self.running
            if not (request.at_limit or request.failed or request in apart)
        ]
        for position, request in enumerate(active):
            if request.status is not Status.RUNNING:
                continue  # preempted by a row before it
            others = len(active) - position - 1  # each keeps at least one token
            row = self._row(request, left - others)
            if row is None:
                continue
            placed = self._place(row, plan, apart)
            if placed is None:
                continue
            plan.rows.append(placed)
            left -= placed.num_tokens + placed.catch_up
        self._admit_waiting(plan, left)
        self._reserve_for_drafting(plan)
        return plan

    def _row(self, request: Request, budget: int) -> RowPlan | None:
        """What ``request`` computes within ``budget`` tokens."""
        new = min(request.todo, budget)
        if new <= 0:
            return None
        drafts = NO_DRAFTS
        if new == request.todo and not request.undrafted:
            drafts = request.drafts.first(budget - new)
        lag = 0
        if self.config.draft_layers and not (request.background or request.rests):
            if not self.config.tapped:
                request.adopt_entries()
                lag = request.draft_lag
            elif request.computed < request.target_floor:
                # It is computed again for its entries: those that others wrote and published stay.
                request.draft_floor = max(request.draft_floor, request.table.drafted_slots)
        catch_up = min(lag, budget - new - len(drafts))
        return RowPlan(request, request.computed, new, drafts, catch_up)

    def _place(self, row: RowPlan, plan: StepPlan, apart: Collection[Request]) -> RowPlan | None:
        """Find slots for ``row``: without its drafts if need be, then at a neighbour's cost."""
        request = row.request
        while True:
            try:
                request.table.ensure(self._slots(row))
                return row
            except PoolExhausted:
                if self._reclaim(plan, request, apart):
                    continue
                if row.drafts:
                    row = attrs.evolve(row, drafts=NO_DRAFTS)
                    continue
                if apart:
                    raise
                planned = {placed.request for placed in plan.rows}
                # the last in turn, and the background's before it
                victim = next((other for other in reversed(self.running) if other not in planned), request)
                self.preempt(victim)
                if victim is request:
                    return None

    def _slots(self, row: RowPlan) -> int:
        """Slots a row cannot do without; with draft layers also that of the token it will draw."""
        slots = row.start + row.num_tokens
        if self.config.draft_layers:
            slots = max(slots, min(slots + 1, row.request.limit - 1))
        return slots

    def _reclaim(self, plan: StepPlan, asking: Request, apart: Collection[Request]) -> bool:
        """Take back slots that others only wanted for drafting."""
        planned = {row.request: row for row in plan.rows}
        freed = False
        for request in self.running:
            if request is asking or request in apart:
                continue
            row = planned.get(request)
            wanted = self._slots(row) if row else request.computed + 1
            # What is computed again after a failed feed is not written again: it must stay.
            freed |= request.table.trim(max(wanted, request.target_floor))
        return freed

    def preempt(self, request: Request) -> None:
        """Take a running request's blocks; it is computed again, from its tokens, when there is room."""
        self._lifecycle.preempted(request)  # before any slot moves
        self._leave(request)
        request.drop_kv()
        request.status = Status.WAITING
        request.stats.preemptions += 1
        self.num_preemptions += not request.background
        insort(self.waiting, request, key=_turn)

    def _admit_waiting(self, plan: StepPlan, left: int) -> None:
        """Admit while tokens, rows and blocks last; never at a running request's cost."""
        while left > 0 and len(self.running) < self.config.max_num_seqs:
            request = self._next()
            if request is None:
                break
            try:
                row = self._admit(request, left)
            except AdapterLost as error:
                self.waiting.remove(request)
                self.lost.append((request, str(error)))
                continue
            self._refused = None if row is not None else (request, self.pool.num_free)
            if row is None:
                break
            plan.rows.append(row)
            left -= row.num_tokens + row.catch_up

    def _next(self) -> Request | None:
        """The first in the queue that waits for tokens, rows and blocks alone.

        Where all slots of adapters are held, no later request may take one from who waits for it: those
        without an adapter pass, the others do not.
        """
        slots = True
        for request in self.waiting:
            if request.waits_for_leader:
                continue
            if request.adapter is not None and self.adapters is not None:
                slots = slots and self.adapters.may_hold(request.adapter)
                if not slots:
                    continue
            return request
        return None

    def _admit(self, request: Request, budget: int) -> RowPlan | None:
        try:
            self._take_prefix(request)
            row = self._row(request, budget)
            if row is None or (row.new < request.todo and not self.config.chunked_prefill):
                raise PoolExhausted
            request.table.ensure(self._slots(row))
            if request.adapter is not None and self.adapters is not None:
                self.adapters.hold(request.adapter)  # last: it may take a while
        except BaseException as error:  # whatever it is, a waiting request holds no block
            request.drop_kv()
            if isinstance(error, PoolExhausted):
                return None
            raise
        resumed = request.admitted
        if not resumed:
            request.stats.cached_tokens = request.computed
        self.waiting.remove(request)
        insort(self.running, request, key=_turn)
        request.status, request.admitted = Status.RUNNING, True
        self._lifecycle.added(request, resumed=resumed)
        return row

    def _take_prefix(self, request: Request) -> None:
        """Start behind what the prefix cache holds.

        At least the last token is computed again, for its logits; with taps also the one before the
        end of the hit, whose hidden state the next entry is made from. Neither is written again.
        Log-probabilities of a prompt want all of it computed. Where the proposer rests, a request takes
        blocks without its entries as well, and rests with them.
        """
        if not self.config.prefix_caching or request.scores_prompt or request.background:
            return
        tapped = self.config.draft_layers and self.config.tapped
        rests = tapped and self.rests(request)
        hit = request.table.take_prefix(request.token_ids, drafted_only=tapped and not rests)
        if not hit.tokens:
            return
        if rests and hit.drafted < hit.tokens:
            request.rests, tapped = True, False
        request.computed = min(hit.tokens - 1 if tapped else hit.tokens, len(request.token_ids) - 1)
        request.target_floor = hit.tokens
        request.draft_floor = hit.drafted
        request.own = [hit.drafted] * len(request.own)

    def _reserve_for_drafting(self, plan: StepPlan) -> None:
        """Scratch slots for the drafting at the end of this step; nobody is preempted for them."""
        if not self.config.draft_layers:
            return
        for row in plan.rows:
            if row.request.background:
                continue
            try:
                row.request.table.ensure(self._slots(row) + 1 + self.config.draft_reserve)
            except PoolExhausted:
                return

    # -- after the step -------------------------------------------------------------------------
    def publish(self, plan: StepPlan) -> None:
        """Offer the full blocks this step completed to later requests."""
        for row in plan.rows:
            self.publish_blocks(row.request)

    def publish_blocks(self, request: Request) -> None:
        """Offer the full blocks of ``request``."""
        if not self.config.prefix_caching or request.background or request.failed:
            return
        if request.status in (Status.RUNNING, Status.ENDED):
            drafted = min(request.own) if request.own else None
            request.table.publish(request.token_ids, min(request.computed, len(request.token_ids)), drafted)

    def forget_draft_layers(self) -> None:
        """From now on nobody writes draft entries."""
        self.config = attrs.evolve(self.config, draft_layers=False, draft_reserve=0)

    def finish(self, request: Request, reason: str) -> None:
        """Take a request out and give its blocks back."""
        if request in self.running:
            self._leave(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        request.drop_kv()
        request.status = Status.FINISHED
        request.finish_reason = reason

    def _leave(self, request: Request) -> None:
        """It does not run any more."""
        self.running.remove(request)
        if request.adapter is not None and self.adapters is not None:
            self.adapters.release(request.adapter)

    def check(self) -> None:
        """Raise AssertionError if blocks and tables do not add up."""
        self.pool.check([block for request in self.running for block in request.table.blocks])


def _turn(request: Request) -> tuple[bool, int, int]:
    """Who comes first; fixed for life, so that a preempted request loses its place to nobody."""
    return request.background, request.priority, request.arrival
