"""Allocations that fail and a model that raises: a step is taken back whole, and the engine goes on."""

from __future__ import annotations

import itertools

import pytest

ORDERS = pytest.mark.parametrize("order", ["plain", "late"])
#: Without state, with draft layers fed by ids, and by taps on a tree.
METHODS = pytest.mark.parametrize("method", ["none", "self-draft", "eagle-fixed-tree"])

OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB"


def breaking(monkeypatch, owner, name, error, *, at, after=False):
    """Let call number ``at`` (from 0) of ``owner.name`` raise, before or after it worked."""
    work, calls = getattr(owner, name), itertools.count()

    def wrapped(*args, **keywords):
        if next(calls) != at:
            return work(*args, **keywords)
        if after:
            work(*args, **keywords)
        raise error

    monkeypatch.setattr(owner, name, wrapped)


def places(rig):
    core = rig.core
    return {
        "forward": (core.runner, "forward"),
        "model": (core.runner.model, "forward"),
        "logits": (core.runner.model, "compute_logits"),
        "verify": (core.verification, "verify"),
        "move": (core.runner, "keep_accepted"),
        "pool": (core.scheduler.pool, "allocate"),
    }


@ORDERS
@METHODS
@pytest.mark.parametrize(
    ("where", "after"),
    [
        ("model", False),
        ("forward", True),
        ("logits", False),
        ("verify", False),
        ("move", False),
        ("pool", False),
    ],
)
def test_a_step_that_raises_can_be_repeated(lab, monkeypatch, method, order, where, after):
    """Each third step fails once: nobody's output knows of it, log-probabilities of prompts included."""
    asks = [
        *lab.mixed(4, max_tokens=18),
        lab.ask(lab.prompt(5), temperature=0, max_tokens=5, prompt_logprobs=0),
    ]
    with lab.rig(method, asks, order, num_gpu_blocks_override=40, max_num_batched_tokens=24) as rig:
        for number, ask in enumerate(asks):
            rig.add(f"q{number}", ask)
        finished, broken = {}, 0
        for step in itertools.count():
            if not rig.llm.llm_engine.has_unfinished_requests():
                break
            with monkeypatch.context() as patch:
                if step % 3 == 1:
                    breaking(patch, *places(rig)[where], RuntimeError(OUT_OF_MEMORY), at=0, after=after)
                try:
                    finished |= rig.step()
                except RuntimeError as error:
                    assert str(error) == OUT_OF_MEMORY
                    broken += 1
            rig.core.scheduler.check()
        assert broken > 2
        assert finished.keys() == {f"q{number}" for number in range(len(asks))}
        for number, ask in enumerate(asks):
            rig.compare(ask, finished[f"q{number}"])
        assert len(finished["q4"].prompt_logprobs) == len(asks[4].prompt)


@ORDERS
@METHODS
@pytest.mark.parametrize("where", ["forward", "logits", "pool", "verify"])
@pytest.mark.parametrize("at", [0, 4])
def test_generate_passes_it_on_and_serves_the_next_call(lab, monkeypatch, method, order, where, at):
    asks = lab.mixed(5, max_tokens=9)
    seated = order == "late" and at > 0 and where != "pool"
    if seated:
        asks = [ask for index, ask in enumerate(lab.mixed(16, max_tokens=20)) if index % 8 in (0, 1, 4, 6)]
    with lab.rig(method, asks, order, num_gpu_blocks_override=40 + 40 * seated) as rig:
        with monkeypatch.context() as patch:
            if seated:
                error = RuntimeError(OUT_OF_MEMORY)
                breaking(patch, rig.core.steady, "run", error, at=2, after=where == "verify")
            else:
                breaking(patch, *places(rig)[where], RuntimeError(OUT_OF_MEMORY), at=at)
            with pytest.raises(RuntimeError, match="out of memory"):
                rig.generate(asks)
        idle(rig)
        rig.generate(asks)
        assert rig.llm.reset_prefix_cache()


@ORDERS
def test_strangers_of_the_same_engine_are_served_when_generate_fails(lab, monkeypatch, order):
    """Requests of somebody who drives the engine by hand go on, under ids that generate would have taken."""
    asks = lab.mixed(4)
    with lab.rig("self-draft", asks, order) as rig:
        for name, ask in zip(("0", "1"), asks, strict=False):
            rig.add(name, ask)
        rig.step(2)
        with monkeypatch.context() as patch:
            breaking(patch, rig.core.runner, "forward", RuntimeError(OUT_OF_MEMORY), at=1)
            with pytest.raises(RuntimeError, match="out of memory"):
                rig.generate(asks[2:])
        finished = rig.drain()
        assert finished.keys() == {"0", "1"}
        for name, ask in zip(("0", "1"), asks, strict=False):
            rig.compare(ask, finished[name])


@ORDERS
@pytest.mark.parametrize("where", ["make_drafts", "Feed"])
def test_an_allocation_that_fails_in_drafting_costs_drafts(lab, monkeypatch, order, where):
    from specdecode.engine import drafting

    asks = lab.mixed(5)
    with lab.rig("eagle", asks, order, failures=True) as rig:
        with monkeypatch.context() as patch:
            breaking(patch, drafting, where, RuntimeError(OUT_OF_MEMORY), at=3)
            rig.generate(asks)
        assert rig.metric("specdecode:proposer_failures") == 1
        assert rig.metric("vllm:spec_decode_num_accepted_tokens") > 0
        rig.generate(asks)


def test_an_engine_that_is_full_for_a_moment(lab, monkeypatch):
    """A pool that says it is exhausted although it is not: everybody waits, nobody is lost."""
    from specdecode.kv import PoolExhausted

    asks = lab.mixed(5)
    with lab.rig("self-draft", asks, "plain") as rig:
        with monkeypatch.context() as patch:
            for at in (3, 9, 20):
                breaking(patch, rig.core.scheduler.pool, "allocate", PoolExhausted("full"), at=at)
            rig.generate(asks)
        rig.generate(asks)


def idle(rig):
    """Nothing is left of a call."""
    rig.drain()
    core = rig.core
    assert not core.outputs and not core.has_unfinished
    core.scheduler.pool.check([])
