"""A proposer that rests is left out of steps, and what it keeps of the rows falls behind: whenever it rests,
and whoever is woken when, tokens stay the same, and drafts are those of a proposer that never rested."""

from __future__ import annotations

import functools
import random

import pytest
import torch
from specdecode.contract import Bucket
from specdecode.engine.pacing import MeasuredCurve
from specdecode.testing.invariants import EngineWatch, check_core

ADAPTIVE = {"adaptive": True}
METHODS = (
    "eagle", "eagle-grown-tree", "eagle3", "eagle3-grown-tree", "self-draft", "small-draft", "medusa",
    "cascade-on-device",
)  # fmt: skip


def restless(rig, seed=0, watched=True):
    """Have the proposer rest in spells, explore in them, and wake anybody, at random."""
    pacer, rng = rig.core.drafting.policy.pacer, random.Random(seed)
    counts = dict.fromkeys(("rest", "fed", "wake", "behind"), 0)

    def alike(rows, limits, possible, *, size=None, gaps=None):
        pacer.feeds, pacer.waking = True, ()
        if rng.random() < 0.2:
            pacer._rest.on = not pacer._rest.on
        behind = [row for row, lag in zip(rows, gaps.behind, strict=True) if lag]
        able = [0 if lag else limit for limit, lag in zip(limits, gaps.behind, strict=True)]
        counts["behind"] += bool(behind)
        if behind and rng.random() < 0.25:
            counts["wake"] += 1
            pacer.waking = tuple(rng.sample(behind, rng.randint(1, len(behind))))
        pacer.feeds = not pacer.resting or rng.random() < 0.2
        counts["fed" if pacer.feeds else "rest"] += 1
        return pacer._alike(rows, able, rng.choice(possible) if pacer.feeds else 0, "gain")

    pacer.alike = alike
    if watched:
        step = rig.core.step

        def checked():
            before = {request: list(request.own) for request in rig.core.scheduler.running}
            outputs = step()
            check_core(rig.core)
            for request in rig.core.scheduler.running:
                own = before.get(request)
                if request.own and not request.rests and request in rig.core._seated and own:
                    assert min(request.own) == len(request.token_ids)
                if request.rests:
                    assert request.behind >= 1
            return outputs

        rig.core.step = checked
    return counts


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("method", METHODS)
def test_tokens_and_drafts_do_not_depend_on_who_rests_when(lab, method, seed):
    """In seats and out of them, chunked prompts and prefix hits; every draft is compared with a reference."""
    asks = [*lab.mixed(4), *lab.seatable(6, max_tokens=36)]
    with lab.rig(method, asks, "late", policy=ADAPTIVE) as rig:
        watch = EngineWatch(rig.core, lab.model)
        counts = restless(rig, seed)
        rig.generate(asks)
        rig.generate(asks[2:8])
        watch.check_published()
        assert min(counts["rest"], counts["fed"]) > 5
        assert method == "medusa" or counts["wake"]
        assert rig.core.drafting.needs.width <= len(rig.metric("specdecode:draft_lengths"))
        assert sum(bool(record.budget) for record in rig.recording.drafts) > 10


@pytest.mark.parametrize("method", ["eagle", "self-draft"])
def test_preemptions_and_aborts_amid_rest(lab, method):
    asks = lab.seatable(8, max_tokens=24)
    with lab.rig(method, asks, "late", policy=ADAPTIVE, num_gpu_blocks_override=34) as rig:
        counts = restless(rig, 4)
        rig.generate_but(asks, ("2", "5"), 14)
        assert rig.metric("vllm:num_preemptions") > 0 and counts["behind"] and counts["rest"]


def test_a_proposer_that_fails_amid_rest_costs_drafts_alone(lab):
    asks = lab.seatable(6, max_tokens=30)
    with lab.rig("eagle", asks, "late", policy=ADAPTIVE, recorded=False, failures=True) as rig:
        restless(rig, 2, watched=False)
        step = rig.core.step

        def checked():
            before = {r: r.computed for r in rig.core.scheduler.running if r.rests}
            outputs = step()
            assert all(r.computed >= before[r] for r in rig.core.scheduler.running if r.rests and r in before)
            return outputs

        rig.core.step = checked
        rig.fail_every(6)
        rig.generate(asks)
        assert rig.metric("specdecode:proposer_failures") > 0


def steady(rig, rests=False):
    """Have the pacer choose the widest step, or have the proposer rest."""
    pacer = rig.core.drafting.policy.pacer
    wish = {"rests": rests, "wake": False}

    def alike(rows, limits, possible, *, size=None, gaps=None):
        behind = [row for row, lag in zip(rows, gaps.behind, strict=True) if lag]
        able = [0 if lag else limit for limit, lag in zip(limits, gaps.behind, strict=True)]
        pacer._rest.on, pacer.feeds = wish["rests"], not wish["rests"]
        pacer.waking, wish["wake"] = tuple(behind) if wish["wake"] else (), False
        return pacer._alike(rows, able, possible[-1] if pacer.feeds else 0, "gain")

    pacer.alike = alike
    return wish


@pytest.mark.parametrize("method", ["eagle", "eagle3", "self-draft", "medusa"])
def test_while_it_rests_the_proposer_is_asked_nothing_and_nobody_waits(lab, method):
    asks = lab.seatable(4, max_tokens=40)
    with lab.rig(method, asks, "late", policy=ADAPTIVE) as rig:
        wish = steady(rig)
        for index, ask in enumerate(asks):
            rig.add(str(index), ask)
        finished = {}
        core = rig.core
        while core.scheduler.waiting or not set(core.scheduler.running) <= set(core._seated):
            finished |= rig.step()
        finished |= rig.step()
        assert core.steady.seats.drafts.lens.any()
        wish["rests"] = True
        finished |= rig.step(2)
        asked = len(rig.recording.drafts)
        waits = {reason: counter.total for reason, counter in core.metrics.host_waits.items()}
        kept = {request: list(request.own) for request in core.scheduler.running}
        for _ in range(5):
            assert not core.steady.seats.drafts.lens.any()
            assert all(r.own == own for r, own in kept.items() if r in core.scheduler.running)
            finished |= rig.step()
        grown = {why for why, counter in core.metrics.host_waits.items() if counter.total > waits[why]}
        assert grown <= {"seats"}
        assert core.scheduler.running
        core._trouble = "memory"  # everybody stands up, and sits down again
        finished |= rig.step(3)
        assert (
            len(rig.recording.drafts) == asked or method == "medusa"
        )  # it is not behind: nothing is made up for
        finished |= rig.drain()
        for index, ask in enumerate(asks):
            rig.compare(ask, finished[str(index)])


@pytest.mark.parametrize("method", ["eagle", "self-draft"])
def test_whoever_woke_has_the_drafts_it_would_have_had(lab, method):
    """As many drafts are accepted behind a rest as if there had been none."""
    asks = lab.seatable(4, max_tokens=60, ignore_eos=True)

    def drafted(rests):
        with lab.rig(method, asks, "late", policy=ADAPTIVE) as rig:
            wish = steady(rig)
            for index, ask in enumerate(asks):
                rig.add(str(index), ask)
            finished = rig.step(4)
            wish["rests"] = rests
            finished |= rig.step(8)
            behind = [request for request in rig.core.scheduler.running if request.rests]
            assert bool(behind) == rests
            wish["rests"], wish["wake"] = False, True
            finished |= rig.step(2)
            assert not any(request.rests for request in rig.core.scheduler.running)
            assert all(min(r.own) == len(r.token_ids) for r in rig.core.scheduler.running)
            finished |= rig.drain()
            for index, ask in enumerate(asks):
                rig.compare(ask, finished[str(index)])
            named = {}
            for record in rig.recording.drafts:
                if record.budget and record.room:
                    name = record.request_id.split("/")[0]
                    named.setdefault(name, {})[len(record.history)] = record.ids
            return named

    never, rested = drafted(False), drafted(True)
    both = [(name, at) for name in never for at in never[name].keys() & rested[name].keys()]
    assert len(both) > 20
    # room, and so the number of drafts, may differ by what was committed when
    for name, at in both:
        ids, other = never[name][at], rested[name][at]
        assert ids[: len(other)] == other[: len(ids)]


def test_a_conversation_goes_on_behind_an_answer_given_at_rest(lab):
    """Blocks without draft entries are taken by who rests as well, and left to be written by who does not."""
    (ask,) = lab.seatable(2, max_tokens=40, ignore_eos=True)[:1]
    with lab.rig("eagle", [ask], "late", policy=ADAPTIVE) as rig:
        wish = steady(rig, rests=True)
        (output,) = rig.generate([ask])
        text = [*ask.prompt, *output.outputs[0].token_ids, 7, 8, 9]
        more = lab.ask(text, temperature=0, max_tokens=12)
        cached = []
        for turn in range(2):
            rig.add(f"more{turn}", more)
            finished = rig.step()
            (request,) = rig.core.scheduler.running
            cached.append(request.stats.cached_tokens)
            assert request.rests == (turn == 0)
            if turn == 0:  # wakes, and writes the entries for whoever comes next
                rig.step()
                wish["rests"], wish["wake"] = False, True
            finished |= rig.drain()
            rig.compare(more, finished[f"more{turn}"])
        assert cached[0] >= len(text) - 3 - 2 * 4 and cached[1] >= len(text) - 2 * 4


def test_two_who_woke_at_once_share_the_entries_that_they_write(lab):
    """They hold the same blocks, and one is through before the other: what it published stays as it is."""
    (ask,) = lab.seatable(2, max_tokens=60, ignore_eos=True)[:1]
    with lab.rig("eagle", [ask], "late", policy=ADAPTIVE) as rig:
        wish = steady(rig, rests=True)
        (output,) = rig.generate([ask])
        text = [*ask.prompt, *output.outputs[0].token_ids]
        twins = [
            lab.ask([*text, 11, 12], temperature=0, max_tokens=16),
            lab.ask([*text, 12, 11], temperature=0.9, seed=3, max_tokens=16),
        ]
        for index, twin in enumerate(twins):
            rig.add(str(index), twin)
        finished = rig.step(3)
        first, second = rig.core.scheduler.running
        shared = set(first.table.blocks) & set(second.table.blocks)
        assert first.rests and second.rests and len(shared) > 10
        wish["rests"], wish["wake"] = False, True
        finished |= rig.drain()
        for index, twin in enumerate(twins):
            rig.compare(twin, finished[str(index)])


def test_who_is_looked_at_by_the_host_never_takes_a_prefix_without_entries(lab):
    (ask,) = lab.seatable(2, max_tokens=40, ignore_eos=True)[:1]
    with lab.rig("eagle", [ask], "late", policy=ADAPTIVE) as rig:
        steady(rig, rests=True)
        (output,) = rig.generate([ask])
        text = [*ask.prompt, *output.outputs[0].token_ids]
        rig.add("looked-at", lab.ask(text, temperature=0, max_tokens=12, logprobs=1))
        rig.step()
        (request,) = rig.core.scheduler.running
        assert not request.rests
        rig.drain()
        assert any(record.budget for record in rig.recording.drafts)


def test_the_pacer_itself_rests_and_says_so(lab):
    asks = lab.seatable(8, max_tokens=90, ignore_eos=True)
    with lab.rig("eagle", asks, "late", policy=ADAPTIVE) as rig:
        pacer = rig.core.drafting.policy.pacer
        pacer.whole.observe = lambda *timing: None
        points = {(rows, 1 + width): 1.0 + 2.0 * width for rows in (1, 8) for width in (0, 1, 4)}
        pacer.whole.replace(MeasuredCurve(points), drafting=True)
        rig.generate(asks)
        reasons = {
            metric.labels["reason"]: metric.value
            for metric in rig.llm.get_metrics()
            if metric.name == "specdecode:draft_length_reasons"
        }
        assert reasons["rest"] > reasons["no_gain"] >= 31
        assert pacer.speedup == 1.0


def test_new_weights_amid_rest(lab):
    """All is computed again, so nobody is behind."""
    asks = lab.seatable(4, max_tokens=40)
    with lab.rig("eagle", asks, "late", policy=ADAPTIVE) as rig:
        steady(rig, rests=True)
        for index, ask in enumerate(asks):
            rig.add(str(index), ask)
        finished = rig.step(14)
        assert any(request.rests for request in rig.core.scheduler.running)
        rig.core.drop_kv()
        rig.core.drafting.policy.pacer.forget_all()
        assert not any(request.rests or any(request.own) for request in rig.core.scheduler.waiting)
        finished |= rig.drain()
        for index, ask in enumerate(asks):
            rig.compare(ask, finished[str(index)])


@pytest.mark.parametrize("method", ["self-draft", "eagle-grown-tree", "eagle3"])
def test_steps_in_buckets_that_have_the_proposer_in_them_or_not(lab, method):
    """As captured graphs would: drafting is part of all but the resting ones; five rows run in eight."""
    asks = lab.seatable(10, max_tokens=24)[:5]
    with lab.rig(method, asks, "late", policy=ADAPTIVE, recorded=False) as rig:
        core, steps = rig.core, rig.core.steady
        steps._captured = {
            Bucket(rows, tokens): functools.partial(steps._step, rows, tokens, core._draft)
            for rows in steps._buckets
            for tokens in steps._sizes
        }
        steps._resting = {
            (rows, False): functools.partial(steps._step, rows, 1, steps._no_drafts)
            for rows in steps._buckets
        }
        steps._draft_captured = True
        counts = restless(rig, 1)
        for _ in range(3):
            rig.generate(asks)
        assert counts["rest"] and counts["fed"] and counts["wake"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.usefixtures("captured_steps")
@pytest.mark.parametrize("method", ["self-draft", "eagle", "eagle-grown-tree", "medusa"])
def test_captured_steps_without_the_proposer(lab, method):
    asks = lab.seatable(8, max_tokens=40)
    with lab.rig(method, asks, "late", policy=ADAPTIVE, recorded=False) as rig:
        steps = rig.core.steady
        if steps._draft_captured:
            assert len(steps._resting) == len(steps._buckets)
            shares = rig.core.drafting.policy.pacer._rest.known
            assert shares and all(0 < share <= 1 for share in shares.values())
        rig.generate(asks)
        counts = restless(rig, watched=False)
        rig.generate(asks)
        rig.generate(asks[::-1])
        assert counts["rest"] > 5 and (counts["wake"] or method == "medusa")
