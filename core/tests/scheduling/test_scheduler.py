"""The scheduler with no model: budgets, preemption, admission, and that everybody gets on."""

from __future__ import annotations

import attrs
from hypothesis import given, settings
from hypothesis import strategies as st
from specdecode.api.params import SamplingParams
from specdecode.engine.request import Request, RowDrafts, Status
from specdecode.engine.scheduler import Scheduler, SchedulerConfig
from specdecode.kv import BlockPool

SIZE = 4


class Log:
    """Checks the order of admissions and preemptions as they are told."""

    def __init__(self) -> None:
        self.live: set[str] = set()
        self.preempted_once: set[str] = set()

    def added(self, request: Request, *, resumed: bool) -> None:
        assert resumed == (request.id in self.preempted_once) and request.id not in self.live
        self.live.add(request.id)

    def preempted(self, request: Request) -> None:
        assert request.table.blocks, "told after the slots moved"
        self.live.remove(request.id)
        self.preempted_once.add(request.id)


def scheduler(blocks: int = 64, **config) -> Scheduler:
    config = {"max_num_seqs": 4, "max_num_batched_tokens": 16} | config
    return Scheduler(SchedulerConfig(**config), BlockPool(blocks, SIZE), Log())


def request(name: str, prompt: int, output: int = 8, **fields) -> Request:
    return Request(
        id=name,
        prompt_ids=[(7 * i + len(name)) % 50 for i in range(prompt)],
        params=SamplingParams(max_tokens=output),
        seed=0,
        index=0,
        namespace=name,
        limit=prompt + output,
        **fields,
    )


def run_step(sched: Scheduler, accept: int = 0, draft: int = 0) -> list[str]:
    """One step in which each drawing row accepts up to ``accept`` drafts and is then given ``draft``."""
    plan = sched.schedule()
    assert plan is not None
    assert plan.num_tokens <= sched.config.max_num_batched_tokens
    assert len({row.request for row in plan.rows}) == len(plan.rows) <= sched.config.max_num_seqs
    for row in plan.rows:
        r, taken = row.request, 0
        assert row.new >= 1 and row.start == r.computed
        assert r.table.capacity >= row.start + row.num_tokens
        assert not row.drafts or row.samples
        if row.samples:
            taken = min(accept, len(row.drafts))
            r.token_ids.extend([1] * (taken + 1))
        r.computed = row.start + row.new + taken
        count = min(draft, r.room)
        r.drafts = RowDrafts((1,) * count, tuple(range(-1, count - 1)))
        if len(r.token_ids) >= r.limit:
            r.status = Status.ENDED
    sched.publish(plan)
    for row in plan.rows:
        if row.request.status is Status.ENDED:
            sched.finish(row.request, "length")
    sched.check()
    return [row.request.id for row in plan.rows]


def test_prompts_and_decodes_share_one_budget():
    sched = scheduler(max_num_batched_tokens=8)
    sched.add(request("long", 20))
    sched.add(request("short", 3))
    assert run_step(sched) == ["long"]
    assert run_step(sched) == ["long"]
    plan = sched.schedule()
    assert [(row.request.id, row.new) for row in plan.rows] == [("long", 4), ("short", 3)]


def test_drafts_are_charged_and_leave_a_token_for_every_running_row():
    sched = scheduler(max_num_batched_tokens=8)
    for name in "abcd":
        sched.add(request(name, 2, 40))
    run_step(sched, draft=6)
    plan = sched.schedule()
    assert [row.num_tokens for row in plan.rows] == [5, 1, 1, 1]


def test_without_chunks_a_prompt_waits_until_it_fits():
    sched = scheduler(max_num_batched_tokens=16, chunked_prefill=False)
    sched.add(request("a", 10, 30))
    sched.add(request("b", 10, 30))
    assert run_step(sched) == ["a"]
    assert run_step(sched) == ["a", "b"]


def test_a_full_pool_takes_drafts_first_then_the_youngest():
    sched = scheduler(blocks=6, max_num_batched_tokens=64, prefix_caching=False)
    sched.add(request("old", 8, 20))
    sched.add(request("young", 8, 20))
    run_step(sched, draft=3)
    seen = [run_step(sched, draft=3) for _ in range(6)]
    assert sched.num_preemptions >= 1
    assert all("old" in step for step in seen)
    assert [r.id for r in sched.waiting] == ["young"] and sched.waiting[0].computed == 0


def test_later_completions_wait_for_the_first_ones_prompt_and_hit_it():
    sched = scheduler(max_num_batched_tokens=8)
    first = request("r", 16)
    second = Request(
        id="r.1",
        prompt_ids=first.prompt_ids,
        params=first.params,
        seed=0,
        index=1,
        namespace="r",
        limit=24,
        leader=first,
    )
    other = request("other", 2)
    for r in (first, second, other):
        sched.add(r)
    assert run_step(sched) == ["r"]
    assert second.status is Status.WAITING
    assert run_step(sched) == ["r"]
    plan = sched.schedule()
    rows = {row.request.id: row for row in plan.rows}
    assert set(rows) == {"r", "r.1", "other"}
    assert rows["r.1"].start == 15 and second.target_floor == 16


def test_what_is_computed_again_after_a_failed_feed_keeps_its_slots():
    """They are not written again: given away, they would come back with another's KV in them."""
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, draft_layers=True, tapped=True)
    sched = Scheduler(config, BlockPool(6, SIZE), Log(), num_kv_specs=1)
    old, young = request("old", 7, 15), request("young", 11, 9)
    for r in (old, young):
        sched.add(r)
    for row in sched.schedule().rows:
        row.request.computed = row.start + row.new
        row.request.token_ids.append(1)
    assert len(old.table.blocks) == len(young.table.blocks) == 3
    young.target_floor, young.computed = 11, 0  # what its feed missed is computed once more
    old.token_ids += [1] * 5  # and needs a fourth block
    sched.config = attrs.evolve(config, max_num_batched_tokens=8)  # which leaves a chunk for the young
    assert old in [row.request for row in sched.schedule().rows]
    assert young.status is Status.WAITING or young.table.capacity >= young.target_floor
    sched.check()


@settings(max_examples=120, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20)), min_size=1, max_size=8),
    blocks=st.integers(13, 40),
    budget=st.integers(4, 40),
    accept=st.integers(0, 4),
    draft=st.integers(0, 6),
    caching=st.booleans(),
    chunked=st.booleans(),
)
def test_every_request_gets_to_its_end(lengths, blocks, budget, accept, draft, caching, chunked):
    sched = scheduler(
        blocks,
        max_num_batched_tokens=budget if chunked else max(budget, 50),
        prefix_caching=caching,
        chunked_prefill=chunked,
    )
    requests = [request(f"r{i}", *pair) for i, pair in enumerate(lengths)]
    for r in requests:
        sched.add(r)
    for _ in range(2000):
        if not sched.has_unfinished:
            break
        assert run_step(sched, accept, draft)
    assert all(r.status is Status.FINISHED and len(r.token_ids) == r.limit for r in requests)
    assert sched.pool.num_free == sched.pool.num_blocks


def test_lower_priorities_are_admitted_first_and_preempted_last():
    sched = scheduler(blocks=6, max_num_seqs=3)
    late, urgent, first = (request(name, 4, output=20) for name in ("late", "urgent", "first"))
    late.priority, urgent.priority = 5, -1
    for one in (late, urgent, first):
        sched.add(one)
    assert list(sched.waiting) == [urgent, first, late]
    plan = sched.schedule()
    assert plan is not None and [row.request for row in plan.rows] == [urgent, first, late]
    while late.status is Status.RUNNING:  # until the pool is full
        run_step(sched)
    assert [one.status for one in (urgent, first)] == [Status.RUNNING] * 2
    assert sched.running == [urgent, first] and list(sched.waiting) == [late]
