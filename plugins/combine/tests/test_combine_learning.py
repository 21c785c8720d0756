"""What ``auto`` learns: which arm pays, where, and at what cost of finding out."""

from __future__ import annotations

import pytest
from specdec_combine.auto import AutoProposer
from specdec_combine.learning import ENOUGH, MOST_NAMESPACES, SETTLING, Learner
from specdecode import SamplingParams

NONE = 2


class World:
    """Steps of rows of which each arm gives so many tokens and takes so long."""

    def __init__(self, learner, tokens, seconds):
        self.learner = learner
        self.tokens = tokens  # namespace -> arm -> tokens
        self.seconds = seconds  # rows -> arm -> seconds
        self.chosen = []

    def step(self, rows):
        count = sum(rows.values())
        arm = self.learner.choose(rows)
        self.chosen.append(arm)
        for namespace, number in rows.items():
            for _ in range(number):
                self.learner.committed(namespace, self.tokens[namespace][arm])
        self.learner.took(count, self.seconds[count][arm])

    def run(self, steps, **rows):
        del self.chosen[:]
        for _ in range(steps):
            self.step(rows)
        return [self.chosen.count(arm) / steps for arm in range(3)]


def learner(**keys):
    return Learner(2, **({"trial_steps": 16, "exploration": 0.05} | keys))


def test_the_arm_with_the_most_tokens_a_second_is_chosen_and_the_others_now_and_then():
    world = World(learner(), {"a": [2.0, 3.0, 1.0]}, {1: [1.0, 2.0, 0.9]})
    world.run(100, a=1)
    shares = world.run(2000, a=1)
    assert shares[0] >= 0.95 and shares[1] > 0.01 and shares[NONE] > 0.01
    assert world.learner.rates() == pytest.approx([2.0, 1.5, 1 / 0.9])


def test_no_drafts_is_an_arm():
    world = World(learner(), {"a": [1.2, 1.3, 1.0]}, {1: [1.3, 1.4, 1.0]})
    world.run(100, a=1)
    assert world.run(1000, a=1)[NONE] >= 0.95


def test_finding_out_costs_what_was_agreed():
    world = World(learner(exploration=0.2), {"a": [2.0, 1.0, 1.0]}, {1: [1.0, 1.0, 1.0]})
    world.run(48, a=1)
    assert world.run(4000, a=1)[0] == pytest.approx(0.8, abs=0.03)
    world = World(learner(exploration=0.0), {"a": [2.0, 1.0, 1.0]}, {1: [1.0, 1.0, 1.0]})
    world.run(48, a=1)
    assert world.run(4000, a=1)[0] == 1.0


def test_what_changes_is_found_out():
    world = World(learner(), {"a": [3.0, 1.1, 1.0]}, {1: [1.0, 1.0, 1.0]})
    world.run(200, a=1)
    world.tokens["a"] = [1.1, 3.0, 1.0]
    world.run(2000, a=1)
    assert world.run(1000, a=1)[1] > 0.9


def test_namespaces_learn_apart():
    world = World(learner(), {"a": [3.0, 1.0, 1.0], "b": [1.0, 3.0, 1.0]}, {1: [1.0] * 3, 4: [1.0] * 3})
    world.run(300, a=1)
    assert world.run(100, a=1)[0] > 0.8
    assert world.run(16, b=1)[0] == 1.0  # it knows nothing of b, and begins again
    world.run(100, b=1)
    assert world.run(200, b=1)[1] > 0.8
    assert world.run(200, a=1)[0] > 0.8
    world.run(100, a=1, b=3)
    assert world.run(200, a=1, b=3)[1] > 0.8  # what most rows gain by


def test_the_load_has_a_say():
    """A step of many rows pays for drafts what one of few does not."""
    world = World(learner(), {"a": [3.0, 1.5, 1.0]}, {1: [1.1, 1.05, 1.0], 32: [4.0, 1.2, 1.0]})
    for rows in (1, 32):
        world.run(200, a=rows)
    assert world.run(400, a=1)[0] > 0.85
    assert world.run(400, a=32)[1] > 0.85


def test_steps_behind_a_change_and_outliers_are_not_judged():
    one = learner()
    for step in range(16):
        assert one.choose({"a": 1}) == 0
        one.committed("a", 50 if step < SETTLING else 2)  # the first are of the arm before
        one.took(1, 9.0 if step < SETTLING else 1.0)
    assert one.rates()[0] == pytest.approx(2.0)
    one.took(1, 1e3)
    assert one.rates()[0] == pytest.approx(2.0)


def test_namespaces_are_bounded():
    one = learner()
    for number in range(MOST_NAMESPACES + 10):
        one.choose({str(number): 1})
        one._of(str(number))
    assert one.namespaces == MOST_NAMESPACES
    assert ENOUGH <= 8 - SETTLING  # the shortest trial tells enough


@pytest.mark.parametrize("order", ["plain", "late"])
def test_in_the_engine_by_a_clock_of_ours(llm_of, run, metrics, monkeypatch, order):
    """The target as its own draft gives 3 tokens a step, prompt lookup of this text gives fewer."""
    now = iter(range(10**9))
    monkeypatch.setattr(AutoProposer, "clock", staticmethod(lambda: float(next(now))))
    itself = {"method": "scripted-self-draft", "num_speculative_tokens": 2}
    lookup = {"method": "ngram", "num_speculative_tokens": 1, "prompt_lookup_min": 3}
    llm = llm_of(
        {"method": "auto", "proposers": [lookup, itself], "trial_steps": 8}, async_scheduling=order == "late"
    )
    params = [SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)]
    for first in range(4):
        run(llm, [[3 + first, 9, 4]], params)
    found = metrics(llm)
    chosen = [found[f"auto.{label}.chosen_steps"] for label in ("0.ngram", "1.scripted-self-draft", "none")]
    assert chosen[1] > 0.6 * sum(chosen) and min(chosen) >= 8
    assert found["auto.1.scripted-self-draft.tokens_per_second"] > found["auto.none.tokens_per_second"] > 0
    assert found["auto.namespaces"] == 1
    assert found["vllm:spec_decode_num_accepted_tokens"] > 100
