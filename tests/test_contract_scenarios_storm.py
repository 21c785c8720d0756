"""Drafters that fail now and then, and random schedules: the state of a drafter survives both."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

#: Drafters whose state could go wrong.
STATEFUL = (
    "self-draft",
    "small-draft",
    "eagle",
    "eagle-fixed-tree",
    "eagle-grown-tree",
    "eagle3",
    "cascade",
    "cascade-on-device",
)


@pytest.mark.parametrize("after", [False, True], ids=["before-the-feed", "after-drafting"])
@pytest.mark.parametrize("order", ["plain", "late"])
@pytest.mark.parametrize("method", STATEFUL)
def test_failures_leave_no_hole(lab, method, order, after):
    """Every fourth call raises: the entries it should have written are made up for."""
    asks = lab.mixed(max_tokens=20)
    inner = lab.config(method, lab.texts(asks))
    flaky = {"method": "scripted-flaky", "inner": inner, "every": 4, "after": after}
    with lab.rig(flaky, asks, order, failures=True, num_gpu_blocks_override=60) as rig:
        rig.generate(asks)
        rig.generate(asks[::-1])  # hits on blocks whose entries were written late, or never
        assert rig.metric("specdecode:proposer_failures") == len(rig.recording.failures) > 4
        assert rig.metric("vllm:spec_decode_num_draft_tokens") > 100


@pytest.mark.parametrize("order", ["plain", "late"])
@pytest.mark.parametrize("method", STATEFUL)
def test_hits_on_blocks_without_entries(lab, method, order):
    """The drafter failed on a prompt, and the request ended before that was made up for.

    Without taps the hit is taken, and the entries are made in steps of the token budget. With taps it
    ends at the first block without entries, for lack of hidden states to make them from.
    """
    tapped = "eagle" in method or "cascade" in method
    stem = lab.prompt(5)  # 40 tokens, computed in three chunks
    first = lab.ask(stem, temperature=0, max_tokens=1)
    then = [lab.ask([*stem, 5 + number], temperature=0, max_tokens=9) for number in range(2)]
    inner = lab.config(method, lab.texts(then))
    flaky = {"method": "scripted-flaky", "inner": inner, "calls": [3] if tapped else [1, 2, 3]}
    with lab.rig(flaky, (), order, failures=True, max_num_batched_tokens=16) as rig:
        rig.generate([first])
        failures = len(rig.recording.failures)
        (half_fed,) = rig.generate(then[:1])
        (fed,) = rig.generate(then[1:])
        assert len(rig.recording.failures) == failures > 0
        # With taps the last token of a hit is computed again: the next entry wants its hidden state.
        assert half_fed.num_cached_tokens == (31 if tapped else 40)
        assert fed.num_cached_tokens == (39 if tapped else 40)


@pytest.mark.parametrize("order", ["plain", "late"])
@pytest.mark.parametrize("method", ["self-draft", "small-draft"])
def test_two_requests_make_up_for_the_same_blocks(lab, method, order):
    """What the one has written by then, the other need not and may not write again."""
    stem = lab.prompt(5)  # 40 tokens: the budget is enough for the one's entries and half of the other's
    first = lab.ask(stem, temperature=0, max_tokens=1)
    then = [lab.ask([*stem, 5 + number], temperature=0, max_tokens=16) for number in range(2)]
    inner = lab.config(method, lab.texts(then))
    flaky = {"method": "scripted-flaky", "inner": inner, "calls": [1]}
    with lab.rig(flaky, (), order, failures=True, max_num_batched_tokens=64) as rig:
        rig.generate([first])
        outputs = rig.generate(then)
        assert [output.num_cached_tokens for output in outputs] == [40, 40]
        assert all(output.metrics.drafted > 0 for output in outputs)


def test_commits_tell_the_whole_text(lab):
    """In the plain order before ``propose``; of rows in their seats they lag, and never overtake."""
    asks = [ask for index, ask in enumerate(lab.mixed(16)) if index % 8 in (0, 1, 4, 6)]
    lagging = {}
    for order in ("plain", "late"):
        with lab.rig("self-draft", asks, order, num_gpu_blocks_override=40) as rig:
            rig.generate(asks)
            lagging[order] = rig.recording.lagging
    assert lagging["plain"] == 0 < lagging["late"]


# -- storm -----------------------------------------------------------------------------------------
STEMS = ((7, 16), (6, 11), (5, 8))  # prompt, and how much of it: requests share prefixes

add = st.tuples(
    st.just("add"),
    st.sampled_from(STEMS),
    st.integers(0, 6),  # tokens behind the stem
    st.booleans(),  # seeded
    st.sampled_from((1, 1, 2, 3)),  # completions
    st.integers(0, 8),  # where it stops; 0: nowhere
    st.sampled_from((None, None, 0, 1)),  # drafts it wishes for
)
step = st.tuples(st.just("step"), st.integers(1, 6))
abort = st.tuples(st.just("abort"), st.integers(0, 6))


#: More examples than usual are new ones; the usual ones are the same at each run.
EXAMPLES = int(os.environ.get("SPECDECODE_STORM_EXAMPLES", "40"))


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=EXAMPLES <= 40,
    print_blob=True,
)
@given(
    operations=st.lists(st.one_of(add, add, step, abort), min_size=4, max_size=14),
    method=st.sampled_from((*STATEFUL, "oracle-tree", "ngram", "medusa")),
    order=st.sampled_from(("plain", "late")),
    block_size=st.sampled_from((1, 4, 8)),
    slots=st.sampled_from((112, 240, 560)),
    budget=st.sampled_from((12, 24, 64)),
    disable_at=st.sampled_from((None, 2, 4)),
    flaky=st.booleans(),
)
def test_storm(lab, operations, method, order, block_size, slots, budget, disable_at, flaky):
    asks = {}
    for number, operation in enumerate(operations):
        if operation[0] == "add":
            asks[f"q{number}"] = _ask(lab, *operation[1:])
    inner = lab.config(method, lab.texts(asks.values()))
    if flaky:
        inner = {"method": "scripted-flaky", "inner": inner, "every": 5}
    policy = {"disable_by_batch_size": disable_at}
    options = {
        "block_size": block_size,
        "num_gpu_blocks_override": slots // block_size,
        "max_num_batched_tokens": budget,
        "max_model_len": 64,
    }
    with lab.rig(inner, (), order, policy=policy, failures=flaky, **options) as rig:
        finished = {}
        for number, operation in enumerate(operations):
            if operation[0] == "add":
                rig.add(f"q{number}", asks[f"q{number}"])
            elif operation[0] == "step":
                finished |= rig.step(operation[1])
            else:
                rig.abort(f"q{operation[1]}")
        finished |= rig.drain()
        for name, output in finished.items():
            rig.compare(asks[name], output)


def _ask(lab, stem, tail, seeded, completions, stop, speculation):
    index, length = stem
    ids = lab.prompt(index)[:length] + [15, 16, 17, 18, 19, 13][:tail]
    law = {"temperature": 0.9, "top_p": 0.9, "seed": 5} if seeded else {"temperature": 0}
    base = lab.ask(ids, max_tokens=14, **law)
    stops = lab.expected(base)[stop : stop + 1] if stop else []
    return lab.ask(ids, max_tokens=14, stop_token_ids=stops, n=completions, speculation=speculation, **law)
