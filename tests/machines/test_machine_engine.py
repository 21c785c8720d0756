"""A whole engine under random arrivals, aborts, preemptions and faults, looked at after every step."""

from __future__ import annotations

import itertools
import os

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine
from specdecode.testing.invariants import EngineWatch, check_core

METHODS = ("none", "oracle-tree", "self-draft", "eagle-fixed-tree", "cascade")

#: Prompts share prefixes: (which, how much of it).
STEMS = ((7, 16), (7, 13), (5, 8), (5, 24))
LAWS = (
    {"temperature": 0},
    {"temperature": 0.9, "top_p": 0.9, "seed": 5},
    {"temperature": 0.9, "seed": 6, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"temperature": 0, "logprobs": 1, "prompt_logprobs": 0},
)
TAILS = (0, 4)
MAX_TOKENS = 14


class Broken(Exception):
    """Raised by the test in the midst of a step."""


def family(lab, stem=0, tail=0, law=0, stop=0, n=1, speculation=None):
    """A request of a family so small that its references are made once."""
    index, length = STEMS[stem]
    ids = lab.prompt(index)[:length] + [15, 16, 17, 18, 19, 13][:tail]
    base = lab.ask(ids, max_tokens=MAX_TOKENS, **LAWS[law])
    stops = lab.expected(base)[stop : stop + 1] if stop else []
    return lab.ask(
        ids, max_tokens=MAX_TOKENS, stop_token_ids=stops, n=n, speculation=speculation, **LAWS[law]
    )


class Driver:
    """An engine, what it was asked, and the faults to come."""

    def __init__(self, lab, method, order, *, flaky=False, **options):
        self.lab = lab
        known = [
            family(lab, stem, tail, law) for stem in range(len(STEMS)) for tail in TAILS for law in (0, 1)
        ]
        inner = lab.config(method, lab.texts(known))
        if flaky and inner is not None:
            inner = {"method": "scripted-flaky", "inner": inner, "every": 5, "after": flaky == "after"}
        self.rig = lab.rig(inner, (), order, failures=bool(flaky), max_model_len=64, **options)
        self.rig.stateless = method not in ("none", "ragged")
        self.watch = EngineWatch(self.rig.core, lab.model)
        self.asks = {}
        self.finished = set()
        self.counters = {}
        self._names = (f"q{number}" for number in itertools.count())

    @property
    def alive(self):
        return [name for name in self.asks if self.rig.llm.llm_engine.has_request(name)]

    def add(self, **kind):
        name = next(self._names)
        self.asks[name] = family(self.lab, **kind)
        self.rig.add(name, self.asks[name])

    def abort(self, name):
        self.rig.abort(name)

    def step(self):
        try:
            outputs = self.rig.step()
        except Broken:
            return
        for name, output in outputs.items():
            self.rig.compare(self.asks[name], output)
            self.finished.add(name)

    def fail_once(self, where, *, calls=0, after=False):
        """Let the ``calls``-th next call of ``where`` raise, before or after it did its work."""
        owner, name = {
            "forward": (self.rig.core.runner, "forward"),
            "allocate": (self.rig.core.scheduler.pool, "allocate"),
            "verify": (self.rig.core.verification, "verify"),
            "move": (self.rig.core.runner, "keep_accepted"),
        }[where]
        if name in vars(owner):
            return  # one is on its way
        work, left = getattr(owner, name), itertools.count(calls, -1)

        def failing(*args, **keywords):
            if next(left) > 0:
                return work(*args, **keywords)
            delattr(owner, name)
            if after:
                work(*args, **keywords)
            raise Broken(where)

        setattr(owner, name, failing)

    def check(self):
        """What holds after every step, that of a failed one included."""
        check_core(self.rig.core)
        for metric in self.rig.llm.get_metrics():
            if (
                isinstance(metric.value, int | float)
                and "usage" not in metric.name
                and "num_requests" not in metric.name
            ):
                key = metric.name, *metric.labels.items()
                assert metric.value >= self.counters.get(key, 0), key
                self.counters[key] = metric.value
        for state in self.rig.core.outputs.values():
            request = state.request
            free = self.lab.ask(request.prompt_ids, **self._unstopped(request.params))
            text = self.lab.expected(free, request.index, 64)
            assert state.token_ids == text[: len(state.token_ids)], request.id

    def _unstopped(self, params):
        kept = ("temperature", "top_p", "seed", "repetition_penalty", "frequency_penalty")
        return {name: getattr(params, name) for name in kept} | {
            "max_tokens": MAX_TOKENS,
            "ignore_eos": True,
        }

    def close(self):
        for owner in (self.rig.core.runner, self.rig.core.scheduler.pool, self.rig.core.verification):
            for name in ("forward", "allocate", "verify", "keep_accepted"):
                vars(owner).pop(name, None)
        try:
            for name, output in self.rig.drain().items():
                self.rig.compare(self.asks[name], output)
            self.rig.check()
            self.watch.check_published()
        finally:
            self.rig.llm.shutdown()


KINDS = st.fixed_dictionaries(
    {
        "stem": st.integers(0, len(STEMS) - 1),
        "tail": st.sampled_from(TAILS),
        "law": st.integers(0, len(LAWS) - 1),
        "stop": st.sampled_from((0, 0, 3, 6)),
        "n": st.sampled_from((1, 1, 2, 3)),
        "speculation": st.sampled_from((None, None, 0, 1)),
    }
)
STEPS = st.sampled_from((0, 1, 2, 5, 11))


class EngineMachine(RuleBasedStateMachine):
    """Every rule is followed by some steps, since a machine without them shows nothing."""

    def __init__(self, lab, method):
        super().__init__()
        self.lab = lab
        self.method = method
        self.driver = None

    @initialize(
        order=st.sampled_from(("plain", "late")),
        flaky=st.sampled_from((False, "before", "after")),
        block_size=st.sampled_from((1, 4, 8)),
        slots=st.sampled_from((72, 96, 72, 560)),
        budget=st.sampled_from((6, 16, 64)),
        rows=st.sampled_from((6, 3)),
    )
    def start(self, order, flaky, block_size, slots, budget, rows):
        self.driver = Driver(
            self.lab,
            self.method,
            order,
            flaky=flaky,
            block_size=block_size,
            num_gpu_blocks_override=slots // block_size,
            max_num_batched_tokens=budget,
            max_num_seqs=rows,
        )

    @rule(kinds=st.lists(KINDS, min_size=1, max_size=4), then=STEPS)
    def arrive(self, kinds, then):
        for kind in kinds:
            self.driver.add(**kind)
        self.run(then)

    @precondition(lambda self: self.driver.alive)
    @rule(which=st.integers(0, 7), then=STEPS)
    def abort(self, which, then):
        alive = self.driver.alive
        self.driver.abort(alive[which % len(alive)])
        self.run(then)

    @precondition(lambda self: self.driver.alive)
    @rule(
        where=st.sampled_from(("forward", "allocate", "verify", "move")),
        calls=st.integers(0, 5),
        after=st.booleans(),
        then=STEPS,
    )
    def break_something(self, where, calls, after, then):
        self.driver.fail_once(where, calls=calls, after=after and where == "forward")
        self.run(then)

    @rule(then=STEPS)
    def forget_prefixes(self, then):
        idle = not any(request.table.blocks for request in self.driver.rig.core.scheduler.running)
        assert self.driver.rig.llm.reset_prefix_cache() == idle
        self.run(then)

    def run(self, steps):
        for _ in range(steps):
            self.driver.step()
            self.driver.check()

    @invariant()
    def nothing_is_out_of_place(self):
        if self.driver:
            self.driver.check()

    def teardown(self):
        if self.driver:
            self.driver.close()


#: More examples than usual are new ones; the usual ones are the same at each run, and not shrunk.
EXAMPLES = int(os.environ.get("SPECDECODE_MACHINE_EXAMPLES", "6"))


@pytest.mark.parametrize("method", METHODS)
def test_engine_machine(lab, method):
    run_machine(
        lambda: EngineMachine(lab, method),
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=12,
            deadline=None,
            derandomize=EXAMPLES <= 6,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, *([Phase.shrink] if EXAMPLES > 6 else [])],
        ),
    )


# -- soak ------------------------------------------------------------------------------------------
CONFIGS = tuple(itertools.product(("oracle-tree", "none", "eagle", "ngram", "self-draft"), ("plain", "late")))


def soak(lab, steps):
    """``steps`` random steps in all, shared out to engines of every kind, each with a pool too small."""
    share = -(-steps // len(CONFIGS))
    preemptions = ran = 0
    for number, (method, order) in enumerate(CONFIGS):
        rng = np.random.default_rng(number)
        driver = Driver(
            lab,
            method,
            order,
            flaky=number % 4 == 2 and "after",
            block_size=4,
            num_gpu_blocks_override=20,
            max_num_batched_tokens=24,
            max_num_seqs=5,
        )
        while driver.watch.steps < share:
            if len(driver.alive) < 3 or (len(driver.alive) < 9 and rng.random() < 0.3):
                driver.add(
                    stem=int(rng.integers(len(STEMS))),
                    tail=int(rng.choice(TAILS)),
                    law=int(rng.integers(len(LAWS))),
                    stop=int(rng.choice((0, 0, 3, 6))),
                    n=int(rng.choice((1, 1, 2))),
                )
            if rng.random() < 0.04:
                driver.abort(str(rng.choice(driver.alive)))
            if rng.random() < 0.04:
                where = str(rng.choice(("forward", "allocate", "verify", "move")))
                driver.fail_once(
                    where, calls=int(rng.integers(6)), after=where == "forward" and rng.random() < 0.5
                )
            driver.step()
            driver.check()
        preemptions += driver.rig.metric("vllm:num_preemptions")
        ran += driver.watch.steps
        driver.close()  # no block is missing
    assert ran >= steps and preemptions > steps / 100


def test_soak(lab):
    soak(lab, 1500)


@pytest.mark.sweep
def test_soak_of_ten_thousand_steps(lab):
    soak(lab, 10_000)
