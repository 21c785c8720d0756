"""``adaptive`` and ``num_speculative_tokens_per_batch_size``: whatever length is chosen when, tokens stay the
same, nobody waits for a change of it, and metrics say what was chosen."""

from __future__ import annotations

import random
import statistics

import pytest
import torch
from specdecode.bench.counters import Counters
from specdecode.engine.pacing import REASONS, MeasuredCurve

ADAPTIVE = {"adaptive": True}
METHODS = ("oracle-tree", "ngram", "self-draft", "eagle", "eagle-grown-tree", "medusa", "cascade")
ORDERS = ("plain", "late")


def pacer_of(rig):
    return rig.core.drafting.policy.pacer


def waits(rig):
    return {reason: counter.total for reason, counter in rig.core.metrics.host_waits.items()}


def readings(rig, name):
    return [metric for metric in rig.llm.get_metrics() if metric.name == name]


def erratic(rig, seed=0, widths=None):
    """Have the pacer choose anything it may, at random: a width for all, a length for each."""
    pacer, rng = pacer_of(rig), random.Random(seed)
    chosen = []

    def alike(rows, limits, possible, *, size=None, gaps=None):
        width = rng.choice(widths or possible)
        pacer.feeds, pacer.waking = True, ()
        chosen.append(width)
        return pacer._alike(rows, limits, width, "gain")

    def each(rows, limits):
        lengths = [rng.choice([w for w in widths or range(limit + 1) if w <= limit]) for limit in limits]
        chosen.append(max(lengths, default=0))
        pacer._tell(rows, lengths, "gain")

    pacer.alike, pacer.each = alike, each
    return chosen


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("method", METHODS)
def test_any_choice_of_lengths_keeps_the_tokens(lab, method, order):
    """Rows of all lengths, in both loops, chunked prompts and prefix hits; every draft is checked as well."""
    asks = [*lab.mixed(4), *lab.seatable(4, max_tokens=20)]
    with lab.rig(method, asks, order, policy=ADAPTIVE) as rig:
        chosen = erratic(rig)
        rig.generate(asks)
        rig.generate(asks[2:6])
        assert len(set(chosen)) > 2
        lengths = rig.metric("specdecode:draft_lengths")
        assert len(lengths) == rig.core.drafting.needs.width + 1 and sum(lengths) >= len(chosen)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("method", ["ngram", "eagle", "eagle-grown-tree"])
def test_the_pacer_itself_keeps_the_tokens_and_says_what_it_chose(lab, method, order):
    asks = lab.seatable(8, max_tokens=40)
    with lab.rig(method, asks, order, policy=ADAPTIVE) as rig:
        rig.generate(asks)
        reasons = {metric.labels["reason"]: metric.value for metric in
                   readings(rig, "specdecode:draft_length_reasons")}  # fmt: skip
        assert set(reasons) == set(REASONS) and reasons["start"] >= 1 and sum(reasons.values()) > 10
        assert sum(rig.metric("specdecode:draft_lengths")) >= sum(reasons.values())
        assert rig.metric("specdecode:expected_speedup") > 0.999
        assert Counters.read(rig.llm.get_metrics()).adaptive
        assert not pacer_of(rig)._lengths  # nothing is kept of requests that ended


@pytest.mark.parametrize("method", ["eagle", "eagle-fixed-tree", "cascade-on-device"])
def test_a_change_of_length_waits_for_nobody(lab, method):
    asks = lab.seatable(8, max_tokens=40)
    with lab.rig(method, asks, "late", policy=ADAPTIVE) as rig:
        chosen = erratic(rig)
        for index, ask in enumerate(asks):
            rig.add(str(index), ask)
        finished = {}
        while rig.core.scheduler.waiting or not set(rig.core.scheduler.running) <= set(rig.core._seated):
            finished |= rig.step()
        before, start = waits(rig), len(chosen)
        while rig.core._seated and len(rig.core._seated) == len(asks):
            finished |= rig.step()
        finished |= rig.drain()
        changes = sum(a != b for a, b in zip(chosen[start:], chosen[start + 1 :], strict=False))
        assert changes >= 5
        grown = {reason for reason, count in waits(rig).items() if count > before[reason]}
        assert grown <= {"seats"}
        for index, ask in enumerate(asks):
            rig.compare(ask, finished[str(index)])


def test_a_step_is_as_wide_as_what_is_chosen(lab, monkeypatch):
    """Both what the target computes and what the proposer makes."""
    asks = lab.seatable(4, max_tokens=40)
    with lab.rig("eagle", asks, "late", policy=ADAPTIVE, recorded=False) as rig:
        chosen, run, propose, ran, made = erratic(rig), rig.core.steady.run, None, [], []
        inner = rig.core.drafting.proposer.proposer
        propose = inner.propose

        def launched(rows, tokens, draft):
            ran.append(tokens)
            return run(rows, tokens, draft)

        def proposed(step, out):
            made.append(step.width)
            propose(step, out)
            assert int(out.lens.max()) <= step.width

        monkeypatch.setattr(rig.core.steady, "run", launched)
        monkeypatch.setattr(inner, "propose", proposed)
        rig.generate(asks)
        static = chosen[-len(ran) :]
        assert [tokens - 1 for tokens in ran] == static and {0, 1, 4} <= set(static)
        assert {0, 1, 4} <= set(made)


def test_who_has_just_sat_down_is_not_held_to_have_got_no_drafts(lab):
    """Else a second wave of prompts tells that drafts are seldom made, and none is made any more."""
    asks = lab.seatable(8, max_tokens=40)
    with lab.rig("eagle", asks, "late", policy=ADAPTIVE, recorded=False) as rig:
        pacer, told = pacer_of(rig), []
        pacer.held = 2
        verified = pacer.verified

        def watched(step):
            told.extend((own.offered, own.drafted) for own in step)
            verified(step)

        pacer.verified = watched
        for index, ask in enumerate(asks):
            rig.add(str(index), ask)
            rig.step()  # each finds others in their seats, with drafts
            rig.step()
        rig.drain()
        assert (2, 2) in told and all(offered == drafted for offered, drafted in told)


@pytest.mark.parametrize("width", [0, 4])
def test_the_device_waits_for_the_hosts_drafts_only_where_there_are_to_be_any(lab, width):
    """A proposer on the host is told every token all the same, once and in order."""
    asks = lab.seatable(6, max_tokens=24)
    with lab.rig("ngram", asks, "late", policy=ADAPTIVE, recorded=False) as rig:
        erratic(rig, widths=[width])
        inner, told = rig.core.drafting.proposer.proposer, {}
        propose = inner.propose

        def listening(step, out):
            positions, ids, rows = step.positions, step.ids, step.rows
            for position, token, row in zip(positions, ids, rows, strict=True):
                text = told.setdefault(step.request_ids[row], {})
                assert text.setdefault(int(position), int(token)) == token
            propose(step, out)

        inner.propose = listening
        for index, ask in enumerate(asks):
            rig.add(str(index), ask)
        finished = rig.drain()
        assert (waits(rig)["host_proposer"] > 0) == (width > 0)
        for index, ask in enumerate(asks):
            rig.compare(ask, finished[str(index)])
            (text,) = [text for name, text in told.items() if name.split("/")[0] == str(index)]
            whole = [*ask.prompt, *finished[str(index)].outputs[0].token_ids]
            # What comes last may be drawn behind the stop, or not be fed any more.
            assert list(text) == list(range(len(text))) and len(text) >= len(whole) - 6
            assert list(text.values())[: len(whole)] == whole[: len(text)]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("method", ["eagle", "ngram"])
def test_preemptions_and_aborts_amid_changing_lengths(lab, method, order):
    asks = lab.seatable(8, max_tokens=24)
    with lab.rig(method, asks, order, policy=ADAPTIVE, num_gpu_blocks_override=34) as rig:
        erratic(rig)
        rig.generate_but(asks, ("2", "5"), 12)
        assert rig.metric("vllm:num_preemptions") > 0
        assert not pacer_of(rig)._lengths


def test_scores_have_a_say_in_the_plain_order_and_change_no_token(lab):
    """The drafter says which of its drafts are spoilt; core finds out that it speaks the truth."""
    asks = lab.seatable(6, max_tokens=40)
    config = lab.config("oracle", lab.texts(asks)) | {"wrong_at": [2, 3], "num_speculative_tokens": 5}
    with lab.rig(config, asks, policy=ADAPTIVE, recorded=False) as rig:
        pacer, inner = pacer_of(rig), rig.core.drafting.proposer.proposer
        pacer.each = lambda rows, limits: pacer._tell(rows, list(limits), "gain")
        pacer.target.replace(MeasuredCurve({(1, 1): 1.0, (1, 6): 1.1, (8, 1): 1.0, (8, 6): 1.8}))
        pacer.target.observe = lambda *timing: None
        propose, kept = inner.propose, []

        def telling(step, out):
            propose(step, out)
            out.score[:] = 0.9
            out.score[:, 2:] = 0.1

        inner.propose = telling
        verified = pacer.verified

        def watched(step):
            kept.extend(own.drafted for own in step if own.drafted)
            verified(step)

        pacer.verified = watched
        rig.generate(asks)
        assert max(kept[:3]) >= 3 and statistics.mode(kept[6:]) == 2


@pytest.mark.parametrize("order", ORDERS)
def test_a_table_by_load_acts(lab, order):
    """Three and more run: one draft; two: as before, which is the entry below; alone: three."""
    table = {"num_speculative_tokens_per_batch_size": [[1, 1, 3], [3, 8, 1]]}
    asks = [lab.ask(lab.prompt(0), temperature=0, max_tokens=10 + 12 * index) for index in range(4)]
    with lab.rig("self-draft", asks, order, policy=table) as rig:
        seen = {}
        for index, ask in enumerate(asks):
            rig.add(str(index), ask)
        verified = rig.core.metrics.delivered

        def delivered(stats, *, drafted, **counts):
            seen.setdefault(rig.core.scheduler.num_running, set()).add(drafted)
            verified(stats, drafted=drafted, **counts)

        rig.core.metrics.delivered = delivered
        rig.drain()
        assert max(seen[4]) == 1 and max(seen[1]) == 3
        if order == "late":
            assert rig.core.steady.widths(4) == (0, 1, 3, 4)


def test_a_table_never_asks_for_more_than_the_method_drafts(lab):
    from specdecode.contract import ConfigError

    table = {"num_speculative_tokens_per_batch_size": [[1, 4, 5]]}
    with pytest.raises(ConfigError, match=r"per_batch_size asks for 5 tokens, and .* drafts 4 at most"):
        lab.rig("self-draft", (), policy=table)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.usefixtures("captured_steps")
@pytest.mark.parametrize("method", ["self-draft", "eagle", "eagle-grown-tree", "ngram"])
def test_captured_steps_of_all_widths(lab, method):
    asks = lab.seatable(8, max_tokens=40)
    with lab.rig(method, asks, "late", policy=ADAPTIVE, recorded=False) as rig:
        steady = rig.core.steady
        assert len(steady._captured) == sum(len(steady.widths(rows)) for rows in steady._buckets)
        curve = pacer_of(rig).whole.curve
        assert all(0 < seconds < 1 for seconds in curve.points.values())
        assert set(curve.points) == {(bucket.rows, bucket.steps) for bucket in steady._captured}
        rig.generate(asks)
        chosen = erratic(rig)
        rig.generate(asks)
        assert len(set(chosen)) > 3


def test_requests_that_cannot_sit_have_lengths_of_their_own(lab):
    asks = [lab.ask(lab.prompt(index), temperature=0, max_tokens=60, logprobs=1) for index in range(2)]
    with lab.rig("self-draft", asks, "late", policy=ADAPTIVE) as rig:
        pacer = pacer_of(rig)
        pacer.target.observe = lambda *timing: None  # a step costs the same, whatever it verifies
        pacer.target.replace(MeasuredCurve({(1, 1): 1.0, (8, 1): 1.0, (8, 8): 1.0}))
        rig.generate(asks)
        lengths = rig.metric("specdecode:draft_lengths")
        assert lengths[4] > 10 and rig.metric("vllm:spec_decode_num_accepted_tokens") > 40
