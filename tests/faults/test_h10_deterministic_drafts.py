"""H10: a drafter that always offers one token changes no law, and at temperature 0 nothing slips in.

Under the default rule, ``invariant``. The law behind every token is p = (.3, .5, .2) over three tokens;
a drafter whose softmax is (.4, .35, .25) offers the first of them, always.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

K = 2
FIRST, SECOND, THIRD = 5, 6, 7
P = {FIRST: 0.3, SECOND: 0.5, THIRD: 0.2}
VOCAB = 12
LAW = [P.get(token, 0.0) for token in range(VOCAB)]


@pytest.fixture(scope="module")
def table(fault_lab):
    import torch

    row = torch.full((VOCAB,), -100.0)
    for token, prob in P.items():
        row[token] = math.log(prob)
    return fault_lab.table(row.expand(VOCAB, -1))


def _engine(faults, table, config):
    return faults.engine(
        {"num_speculative_tokens": K} | config,
        model=table,
        recorded=False,
        skip_tokenizer_init=True,
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        num_gpu_blocks_override=8000,
    )


def _always_first():
    return {"method": "faults-puppet", "token": FIRST}


def test_h10_one_token_offered_always(faults, table):
    """20,000 draws: a draft is accepted with p = .3, and where it is refused the token never comes."""
    from specdecode.testing.laws import assert_law

    engine = _engine(faults, table, _always_first())
    ask = faults.ask([FIRST], temperature=1.0, seed=2, n=200, max_tokens=100, ignore_eos=True)
    (output,) = engine.generate([ask])
    draws = np.concatenate([completion.token_ids for completion in output.outputs])
    assert len(draws) == 20_000
    assert_law(draws, LAW)
    by_slot = [[] for _ in range(K + 1)]
    for completion in output.outputs:
        slot = 0
        # Of the last K tokens and the first, some had no draft beside them.
        rest = len(completion.token_ids) - K
        for place, (token, source) in enumerate(
            zip(completion.token_ids, completion.token_sources, strict=True)
        ):
            if 1 <= place < rest:
                by_slot[slot].append(token)
                assert slot == K or (source == "draft") == (token == FIRST)
            slot = slot + 1 if source == "draft" else 0
    for draws in by_slot:
        assert_law(draws, LAW)
    per_position = engine.metric("vllm:spec_decode_num_accepted_tokens_per_pos")
    assert per_position[0] / engine.drafts == pytest.approx(0.3, abs=0.015)
    assert per_position[1] / per_position[0] == pytest.approx(0.3, abs=0.03)


@pytest.mark.parametrize("method", ["ngram", "scripted-liar", "scripted-self-draft"])
def test_h10_the_law_under_other_drafters(faults, table, method):
    """ngram offers without probabilities; nothing is drafted for lack of texts; and a draft model samples."""
    from specdecode.testing.laws import assert_law

    own = {"prompt_lookup_min": 1, "prompt_lookup_max": 2} if method == "ngram" else {}
    engine = _engine(faults, table, {"method": method, **own})
    ask = faults.ask([FIRST], temperature=1.0, seed=3, n=100, max_tokens=40, ignore_eos=True)
    (output,) = engine.generate([ask])
    assert_law(np.concatenate([completion.token_ids for completion in output.outputs]), LAW)
    assert (engine.accepted > 0) == (method != "scripted-liar")


@pytest.mark.parametrize("offered", [FIRST, SECOND, THIRD])
def test_h10_greedy_is_the_likeliest(faults, table, offered):
    """At T=0 it is always the second token, and a draft is accepted if it is that one."""
    engine = _engine(faults, table, _always_first() | {"token": offered})
    (output,) = engine.generate([faults.ask([FIRST], max_tokens=30, ignore_eos=True)])
    assert set(output.outputs[0].token_ids) == {SECOND}
    assert engine.accepted == (engine.drafted if offered == SECOND else 0)


def test_h10_the_faulty_form_would_be_seen():
    """Accepting with min(1, p/q) a token that was not drawn from q gives (.75, .25, 0)."""
    from specdecode.testing.laws import assert_law

    dice = np.random.default_rng(3).random(50_000)
    # Accepted with .3 / .4; the residual max(p - q, 0) is the second token alone.
    with pytest.raises(AssertionError, match="wrong law"):
        assert_law(np.where(dice < 0.3 / 0.4, FIRST, SECOND), LAW)
