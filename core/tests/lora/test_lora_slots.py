"""Who has a slot: what was used longest ago gives way, what runs does not, and nobody is passed for ever."""

from __future__ import annotations

import pytest
from specdecode import SamplingParams
from specdecode.engine.request import Request, Status
from specdecode.engine.scheduler import Scheduler, SchedulerConfig
from specdecode.kv import BlockPool
from specdecode.lora.slots import Adapter, AdapterLost, AdapterSlots


class NoProposer:
    def added(self, request, *, resumed): ...
    def preempted(self, request): ...


class Loads(list):
    def __call__(self, adapter, slot):
        if adapter.files == "lost":
            raise AdapterLost(f"{adapter.name} is gone")
        self.append((adapter.name, slot))


@pytest.fixture
def loads():
    return Loads()


def adapter(name, files=None):
    return Adapter(name, ord(name), files)


def test_the_one_used_longest_ago_gives_way(loads):
    slots = AdapterSlots(2, loads)
    a, b, c = map(adapter, "abc")
    for one in (a, b, a):
        slots.hold(one)
    assert loads == [("a", 1), ("b", 0)] and (a.slot, b.slot) == (1, 0)
    assert not slots.may_hold(c) and slots.may_hold(a)
    slots.release(b)
    slots.release(a)
    assert slots.may_hold(c)  # b's: a is still held once
    slots.hold(c)
    assert b.slot is None and c.slot == 0 and a.slot == 1
    slots.release(c)
    slots.release(a)
    slots.hold(b)
    assert c.slot == 0 and a.slot is None  # c was used after a


def test_what_cannot_be_loaded_takes_no_slot(loads):
    slots = AdapterSlots(1, loads)
    with pytest.raises(AdapterLost):
        slots.hold(adapter("x", "lost"))
    slots.hold(adapter("a"))
    assert loads == [("a", 0)]


def make(loads, num_slots, max_num_seqs=8):
    config = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=64)
    return Scheduler(config, BlockPool(50, 4), NoProposer(), adapters=AdapterSlots(num_slots, loads))


def request(scheduler, name, own=None):
    made = Request(
        id=name,
        prompt_ids=[5, 6, 7],
        params=SamplingParams(),
        seed=0,
        index=0,
        namespace="",
        limit=40,
        adapter=own,
    )
    scheduler.add(made)
    return made


def running(scheduler):
    return [request.id for request in scheduler.running]


def test_who_waits_for_a_slot_is_passed_by_those_that_want_none(loads):
    scheduler = make(loads, 1)
    a, b = adapter("a"), adapter("b")
    first = request(scheduler, "a1", a)
    request(scheduler, "b1", b)
    request(scheduler, "a2", a)
    request(scheduler, "plain")
    scheduler.schedule()
    assert running(scheduler) == ["a1", "plain"]  # a2 would keep the slot from b1
    assert not scheduler.may_admit
    scheduler.finish(first, "stop")
    assert scheduler.may_admit
    scheduler.schedule()
    assert running(scheduler) == ["b1", "plain"] and [one.id for one in scheduler.waiting] == ["a2"]
    scheduler.check()


def test_a_preempted_request_lets_its_slot_go_and_comes_back_first(loads):
    scheduler = make(loads, 1)
    a, b = adapter("a"), adapter("b")
    first = request(scheduler, "a1", a)
    request(scheduler, "b1", b)
    scheduler.schedule()
    scheduler.preempt(first)
    assert not a.holders
    scheduler.schedule()
    assert running(scheduler) == ["a1"] and loads == [("a", 0)]  # it was still there
    scheduler.finish(first, "stop")
    assert not a.holders


def test_a_lost_adapter_stops_nobody_else(loads):
    scheduler = make(loads, 2)
    lost = request(scheduler, "x1", adapter("x", "lost"))
    request(scheduler, "a1", adapter("a"))
    scheduler.schedule()
    assert running(scheduler) == ["a1"] and not scheduler.waiting
    assert scheduler.lost == [(lost, "x is gone")] and lost.status is Status.WAITING
    assert not lost.table.blocks
