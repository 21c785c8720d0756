"""Speculation leaves the law alone at every draft offset and in the bonus slot, chain and tree.

The target is a table: the law of the next token given the last one. 20,000 requests, told apart by
their seed, are drafted for and verified once. Given that a slot is reached, its token must have the
target's law after the token before it, which for the true rule holds whatever the drafts were. A
verifier that is wrong on purpose must fail the same check.
"""

import numpy as np
import pytest
import torch
from specdecode.api.params import SamplingParams
from specdecode.sampling import SampleRow, SamplingBatch, draw
from specdecode.testing.laws import assert_law, law_pvalue, outside_support
from specdecode.verify import Verdict, walk

torch.set_num_threads(1)
TRIALS, VOCAB, START, PROMPT_LEN = 20_000, 5, 0, 4
PARAMS = SamplingParams(temperature=0.8, top_k=4)
TABLE = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(11)) * 1.2


def target_law(last):
    kept = TABLE[last] / PARAMS.temperature
    kept = torch.where(kept >= kept.topk(PARAMS.top_k).values[-1], kept, -torch.inf)
    return kept.double().softmax(-1).numpy()


def target_draws(seeds, lasts, positions):
    """The target's token after each of ``lasts``, at ``positions``, for the requests of ``seeds``."""
    rows = [
        SampleRow(params=PARAMS, seed=seed, index=0, position=position, num_output=position - PROMPT_LEN)
        for seed, position in zip(seeds, positions, strict=True)
    ]
    batch = SamplingBatch.build(rows, VOCAB, "cpu")
    return draw(TABLE[torch.as_tensor(lasts)], batch).tolist()


def argmax_chain(rng):
    best = TABLE.argmax(-1).tolist()
    chain = [best[START]]
    while len(chain) < 3:
        chain.append(best[chain[-1]])
    return chain, [-1, 0, 1]


def random_chain(rng):
    return rng.integers(0, VOCAB, 3).tolist(), [-1, 0, 1]


def random_tree(rng):
    return rng.integers(0, VOCAB, 6).tolist(), [-1, -1, 0, 1, 0, 2]


DRAFTERS = [argmax_chain, random_chain, random_tree]


def depth_of(parents):
    depths = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


def invariant(targets, ids, parents, rng):
    return walk(targets, ids, parents)


def one_step(drafter, verify):
    """One step of every trial, verified by ``verify(targets, ids, parents, rng)``: the verdicts."""
    rng = np.random.default_rng(5)
    drafts = [drafter(rng) for _ in range(TRIALS)]
    seeds, lasts, positions = [], [], []
    for trial, (ids, parents) in enumerate(drafts):
        seeds += [trial] * (len(ids) + 1)
        lasts += [START, *ids]
        positions += [PROMPT_LEN, *(PROMPT_LEN + 1 + depth for depth in depth_of(parents))]
    targets = iter(target_draws(seeds, lasts, positions))
    return [
        verify([next(targets) for _ in range(len(ids) + 1)], ids, parents, rng) for ids, parents in drafts
    ]


def check_slots(verdicts, slots):
    """The law of each slot given the token before it, wherever enough trials reached it."""
    checked = 0
    for slot in range(slots):
        reached = [(START, *v.tokens)[slot : slot + 2] for v in verdicts if len(v.tokens) > slot]
        for last in {last for last, _ in reached}:
            tokens = [token for previous, token in reached if previous == last]
            if len(tokens) >= 100:
                assert_law(tokens, target_law(last))
                checked += 1
    return checked


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_law_at_each_offset_and_in_the_bonus_slot(drafter):
    verdicts = one_step(drafter, invariant)
    slots = 4
    assert max(len(v.tokens) for v in verdicts) == slots, "some trial must reach the bonus slot"
    assert check_slots(verdicts, slots) >= slots


def accepts_by_probability(targets, ids, parents, rng):
    """Wrong: accepts a draft with its probability, else draws without taking the draft out."""
    accepted, last = [], START
    for i, draft in enumerate(ids):
        if rng.random() >= target_law(last)[draft]:
            return Verdict(tuple(accepted), (*ids[:i], targets[i]))
        accepted.append(i)
        last = draft
    return Verdict(tuple(accepted), (*ids, targets[-1]))


def accepts_a_little_more(targets, ids, parents, rng):
    """Wrong: takes the first draft one time in five although the target drew another token."""
    if rng.random() < 0.2:
        targets = [ids[0], *targets[1:]]
    return walk(targets, ids, parents)


def spoils_the_second_slot(targets, ids, parents, rng):
    """Wrong in a later slot only: a second draft that was right is replaced by another token."""
    verdict = walk(targets, ids, parents)
    if len(verdict.accepted) < 2:
        return verdict
    return Verdict(verdict.accepted[:1], (verdict.tokens[0], (verdict.tokens[1] + 1) % VOCAB))


@pytest.mark.parametrize("biased", [accepts_by_probability, accepts_a_little_more, spoils_the_second_slot])
def test_a_biased_verifier_fails_the_same_check(biased):
    with pytest.raises(AssertionError, match=r"wrong law|probability 0"):
        check_slots(one_step(argmax_chain, biased), 4)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_seeded_output_is_plain_output_to_the_token(drafter):
    """Many steps of 200 requests: the tokens are those of one-by-one decoding."""
    requests, length = 200, 24
    plain = [[START] for _ in range(requests)]
    for step in range(length):
        position = [PROMPT_LEN + step] * requests
        drawn = target_draws(range(requests), [text[-1] for text in plain], position)
        for text, token in zip(plain, drawn, strict=True):
            text.append(token)

    rng = np.random.default_rng(8)
    steps = 0
    for seed in range(requests):
        text = [START]
        while len(text) <= length:
            ids, parents = drafter(rng)
            if len(text) > 1 and seed % 2:  # the next two tokens, so that acceptance is not rare
                ids[:1] = plain[seed][len(text) : len(text) + 1] or ids[:1]
            base = PROMPT_LEN + len(text) - 1
            positions = [base, *(base + 1 + depth for depth in depth_of(parents))]
            targets = target_draws([seed] * len(positions), [text[-1], *ids], positions)
            text += walk(targets, ids, parents).tokens
            steps += 1
        assert text[: length + 1] == plain[seed]
    assert steps < requests * length, "some drafts must have been accepted"


def test_law_pvalue_is_uniform_for_a_true_sampler():
    rng = np.random.default_rng(0)
    law = np.array([0.5, 0.3, 0.15, 0.05])
    pvalues = [law_pvalue(rng.multinomial(20_000, law), law) for _ in range(400)]
    assert abs(np.mean(pvalues) - 0.5) < 0.06
    assert abs(np.mean(np.array(pvalues) < 0.1) - 0.1) < 0.06


def test_law_pvalue_known_value():
    # G = 2 * (60 ln(60/50) + 40 ln(40/50)) = 4.0271; chi-square with 1 degree: p = 0.04477.
    assert law_pvalue([60, 40], [0.5, 0.5]) == pytest.approx(0.04477, abs=1e-4)


def test_rare_outcomes_are_pooled_and_impossible_ones_are_named():
    law = [0.9999, 0.00005, 0.00005, 0.0]
    assert law_pvalue([9998, 1, 1, 0], law) > 0.1
    assert outside_support([10, 0, 0, 2], law) == [3]
    with pytest.raises(AssertionError, match=r"probability 0 were drawn: \[3\]"):
        assert_law([0] * 9 + [3], law)


def test_a_law_that_is_none_is_an_error():
    with pytest.raises(ValueError, match="sum 1"):
        law_pvalue([1, 2], [0.5, 0.6])
