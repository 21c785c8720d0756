"""The scheduler without a model: budgets, order, fairness and room, under random loads and a full pool."""

from __future__ import annotations

import attrs
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from specdecode.api.params import SamplingParams
from specdecode.engine.request import NO_DRAFTS, Request, RowDrafts, Status
from specdecode.engine.scheduler import Scheduler, SchedulerConfig
from specdecode.kv import BlockPool

SIZE = 4
LONGEST = 40  # tokens of a request; what the smallest pool holds


class Proposer:
    """What a proposer is told, and whether that is a legal life."""

    def __init__(self) -> None:
        self.alive: set[str] = set()
        self.preempted_once: set[str] = set()

    def added(self, request: Request, *, resumed: bool) -> None:
        assert request.id not in self.alive
        assert resumed == (request.id in self.preempted_once)
        self.alive.add(request.id)

    def preempted(self, request: Request) -> None:
        assert request.table.blocks, "told after its slots were taken"
        self.alive.remove(request.id)
        self.preempted_once.add(request.id)


@attrs.define(eq=False)
class Waited:
    """For how many steps a running request was passed over in a row."""

    steps: int = 0


class SchedulerMachine(RuleBasedStateMachine):
    """Each step commits a token for each row that draws, and as many drafts as the test likes to accept."""

    @initialize(
        blocks=st.sampled_from((12, LONGEST // SIZE, 16, 30)),
        rows=st.sampled_from((5, 4, 2, 1)),
        spare=st.sampled_from((6, 0, 1, 20)),
        chunked=st.sampled_from((True, True, False)),
        caching=st.booleans(),
        drafting=st.sampled_from(("taps", "ids", "stateless", "none")),
    )
    def start(self, blocks, rows, spare, chunked, caching, drafting):
        budget = rows + spare
        config = SchedulerConfig(
            max_num_seqs=rows,
            max_num_batched_tokens=budget if chunked else max(budget, LONGEST),
            chunked_prefill=chunked,
            prefix_caching=caching,
            draft_layers=drafting in ("ids", "taps"),
            tapped=drafting == "taps",
            draft_reserve=2 if drafting in ("ids", "taps") else 0,
        )
        self.drafting = drafting
        self.told = Proposer()
        self.sched = Scheduler(config, BlockPool(blocks, SIZE), self.told, int(config.draft_layers))
        self.requests: list[Request] = []
        self.waited: dict[Request, Waited] = {}

    # -- rules ----------------------------------------------------------------------------------
    @rule(
        prompt=st.integers(1, 20),
        output=st.sampled_from((20, 12, 3, 1)),
        text=st.integers(0, 2),
        completions=st.sampled_from((1, 1, 1, 3)),
        priority=st.sampled_from((0, 0, 0, 1, -1)),
        count=st.integers(1, 4),
        then=st.integers(0, 3),
    )
    def arrive(self, prompt, output, text, completions, priority, count, then):
        for number in range(count):
            self.queue(min(prompt + number, 20), output, text, completions, priority)
        self.run_steps(then, 1, 4, True)

    def queue(self, prompt, output, text, completions, priority=0):
        leader = None
        ids = tuple((text + 1) * place % 50 for place in range(prompt))
        for index in range(completions):
            request = Request(
                id=f"r{len(self.requests)}",
                prompt_ids=ids,
                params=SamplingParams(max_tokens=output),
                seed=0,
                index=index,
                namespace="",
                limit=prompt + output,
                leader=leader,
                priority=priority,
            )
            leader = leader or request
            self.sched.add(request)
            self.requests.append(request)
            self.waited[request] = Waited()

    @precondition(lambda self: self.sched.has_unfinished)
    @rule(which=st.integers(0, 9))
    def abort(self, which):
        living = [*self.sched.running, *self.sched.waiting]
        request = living[which % len(living)]
        self.sched.finish(request, "abort")
        if request.admitted:
            self.told.alive.discard(request.id)

    @rule(
        steps=st.sampled_from((1, 3, 9)),
        accept=st.sampled_from((1, 0, 3)),
        draft=st.sampled_from((4, 2, 0)),
        feeds=st.booleans(),
    )
    def step(self, steps, accept, draft, feeds):
        self.run_steps(steps, accept, draft, feeds)

    def run_steps(self, steps, accept, draft, feeds):
        for _ in range(steps):
            self.one_step(accept, draft, feeds)

    # -- a step ---------------------------------------------------------------------------------
    def one_step(self, accept, draft, feeds):
        waiting = [request for request in self.sched.waiting if not request.waits_for_leader]
        running = list(self.sched.running)
        plan = self.sched.schedule()
        assert plan is not None
        planned = [row.request for row in plan.rows]
        assert bool(planned) == bool(running or waiting), "nothing is done although there is work"
        if running:
            first = min(running, key=self.turn)
            assert first in planned, "the first in turn does not get on"
        admitted = [request for request in planned if request not in running]
        for request in self.sched.waiting:
            if request in waiting:  # it could have been admitted all the time
                assert all(self.turn(other) < self.turn(request) for other in admitted)
        for request in self.sched.running:
            passed_over = self.waited[request]
            passed_over.steps = 0 if request in planned else passed_over.steps + 1
            assert not passed_over.steps, "a running request is passed over"
        self.run(plan, accept, draft, feeds)

    def run(self, plan, accept, draft, feeds):
        config = self.sched.config
        assert sum(row.num_tokens + row.catch_up for row in plan.rows) <= config.max_num_batched_tokens
        assert len({row.request for row in plan.rows}) == len(plan.rows) <= config.max_num_seqs
        for row in plan.rows:
            self.check_row(row)
            self.compute(row, accept, draft, feeds)
        self.sched.publish(plan)
        for row in plan.rows:
            if row.request.status is Status.ENDED:
                self.sched.finish(row.request, "length")
                self.told.alive.remove(row.request.id)

    def check_row(self, row):
        request, config = row.request, self.sched.config
        assert row.new >= 1 and row.catch_up >= 0 and row.start == request.computed
        assert row.samples or not row.drafts
        slots = row.start + row.num_tokens
        if config.draft_layers:  # and that of the token it will draw, whose entry is written
            slots = max(slots, min(slots + 1, request.limit - 1))
        assert request.table.capacity >= max(slots, request.target_floor)
        healed = request.target_floor > 0  # its target KV is there: what is computed again may be cut
        if not config.chunked_prefill and not row.start and not healed:
            assert row.samples, "a prompt was cut although chunks are off"
        for slot in range(max(row.start, request.target_floor), row.start + row.num_tokens):
            assert self.sched.pool.may_write_target(request.table.blocks[slot // SIZE])

    def compute(self, row, accept, draft, feeds):
        request, taken = row.request, 0
        if row.samples:
            taken = min(accept, len(row.drafts))
            request.token_ids += [1] * (taken + 1)
        request.computed = row.start + row.new + taken
        request.drafts = NO_DRAFTS
        if len(request.token_ids) >= request.limit:
            request.status = Status.ENDED
        if request.own:
            self.feed(row, feeds)
        if self.drafting != "none" and request.todo == 1:
            count = min(draft, request.room)
            request.drafts = RowDrafts((1,) * count, tuple(range(-1, count - 1)))

    def feed(self, row, feeds):
        """As ``Drafting`` does: entries are made, or missing ones are computed again."""
        request = row.request
        if feeds:
            start = row.start + 1 if row.start and self.drafting == "taps" else min(request.own)
            if self.drafting == "taps":
                start = min(start, row.start + 1 if row.start else 0)
                if start <= request.own[0]:
                    request.own = [max(request.own[0], request.computed + 1)]
            else:
                request.own = [min(request.computed + 1, request.own[0] + row.num_tokens + row.catch_up + 1)]
        elif self.drafting == "taps" and request.own[0] <= request.computed and self.runs(request):
            request.target_floor = max(request.target_floor, request.computed)
            request.computed = max(0, request.own[0] - 1)

    def turn(self, request):
        return request.priority, self.requests.index(request)

    def runs(self, request):
        return request.status is Status.RUNNING

    # -- what holds -----------------------------------------------------------------------------
    @invariant()
    def everything_is_in_its_place(self):
        sched = self.sched
        sched.check()
        running, waiting = sched.running, list(sched.waiting)
        assert len(running) <= sched.config.max_num_seqs
        assert not set(running) & set(waiting)
        assert all(request.status is Status.RUNNING and request.table.blocks for request in running)
        assert all(not request.table.blocks and not request.computed for request in waiting)
        for queue in (running, waiting):
            assert queue == sorted(queue, key=self.turn), "not first come, first served within a priority"
        assert self.told.alive == {request.id for request in running}

    def teardown(self):
        """Everybody gets to the end, in as many steps as that can take and no more."""
        left = sum(request.limit for request in [*self.sched.running, *self.sched.waiting])
        for _ in range(left + 1):
            if not self.sched.has_unfinished:
                break
            self.one_step(0, 2, True)
        assert not self.sched.has_unfinished, "not done in the steps that one after the other would take"
        assert self.sched.pool.num_free == self.sched.pool.num_blocks and not self.told.alive


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=120, stateful_step_count=30, deadline=None, derandomize=True, database=None
)
