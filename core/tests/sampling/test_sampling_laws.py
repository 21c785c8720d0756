"""The sampler draws from exactly the law that the parameters say: 20,000 draws a case."""

import numpy as np
import pytest
import torch
from specdecode.api.params import SamplingParams
from specdecode.sampling import SampleRow, SamplingBatch, TokenHistory, draw, needs_history
from specdecode.testing.laws import assert_law

TRIALS = 20_000
LOGITS = [2.0, 1.5, 1.0, 0.25, 0.0, -0.5, -1.0, -1.5, -2.5, -4.0, 1.25, 0.5]
PROMPT, OUTPUT, PATH = (0, 1, 4, 4), (0, 10, 10), (2, 10)
STOPS = (1, 3)

CASES = {
    **{
        f"temperature={t},{name}": {"temperature": t, **fields}
        for t in (0.5, 1.0, 2.0)
        for name, fields in {
            "plain": {},
            "top_k": {"top_k": 3},
            "top_p": {"top_p": 0.7},
            "top_k+top_p": {"top_k": 5, "top_p": 0.7},
            "min_p": {"min_p": 0.3},
        }.items()
    },
    "logit_bias": {"logit_bias": {0: -100.0, 9: 4.0, 3: -0.7}},
    "allowed": {"allowed_token_ids": (1, 4, 9)},
    "min_tokens": {"min_tokens": 9},
    "min_tokens reached": {"min_tokens": 5},
    "stop_token_ids": {"min_tokens": 9, "stop_token_ids": (0,)},
    "presence": {"presence_penalty": 0.9},
    "frequency": {"frequency_penalty": 0.6},
    "repetition": {"repetition_penalty": 1.3},
    "encouraged": {"presence_penalty": -0.5, "frequency_penalty": -0.3, "repetition_penalty": 0.8},
    "all": {
        "temperature": 0.8, "top_p": 0.95, "top_k": 7, "min_p": 0.02, "presence_penalty": 0.5,
        "frequency_penalty": 0.4, "repetition_penalty": 1.2, "min_tokens": 9, "logit_bias": {7: 2.0, 2: -1.0},
    },
}  # fmt: skip


def rows_of(params, trials=TRIALS, **fields):
    """A row for each trial, told apart by its seed unless ``fields`` says otherwise."""
    history = None
    if needs_history(params):
        history = TokenHistory(PROMPT)
        history.extend(OUTPUT)
    fixed = {"index": 0, "position": 9, "num_output": len(OUTPUT) + len(PATH), "stop_ids": STOPS}
    varied = fields or {"seed": range(trials)}
    return [
        SampleRow(
            params=params,
            history=history,
            path=PATH,
            **{"seed": 77} | fixed | {name: values[i] for name, values in varied.items()},
        )
        for i in range(trials)
    ]


def draws(rows, logits=LOGITS):
    expanded = torch.tensor(logits).expand(len(rows), -1)
    return draw(expanded, SamplingBatch.build(rows, len(logits), "cpu"))


@pytest.mark.parametrize("case", CASES)
def test_law(case, exact_law):
    params = SamplingParams(**CASES[case])
    law = exact_law(LOGITS, params, PROMPT, OUTPUT + PATH, len(OUTPUT + PATH), STOPS)
    assert_law(draws(rows_of(params)), law)


@pytest.mark.parametrize("axis", ["position", "index"])
def test_one_seed_gives_the_law_along_its_own_axes(axis, exact_law):
    params = SamplingParams(temperature=0.9, top_p=0.9)
    law = exact_law(LOGITS, params)
    assert_law(draws(rows_of(params, **{axis: range(TRIALS)})), law)


def test_neighbouring_positions_are_independent(exact_law):
    """The pair of two successive draws of one seed has the product law."""
    params = SamplingParams()
    law = np.array(exact_law(LOGITS, params))
    seeds, positions = np.repeat(np.arange(TRIALS), 2), np.tile([9, 10], TRIALS)
    rows = rows_of(params, 2 * TRIALS, seed=seeds.tolist(), position=positions.tolist())
    pairs = draws(rows).reshape(-1, 2).numpy()
    assert_law(pairs[:, 0] * len(law) + pairs[:, 1], np.outer(law, law).ravel())


def test_rows_of_many_kinds_in_one_batch_keep_their_laws(exact_law):
    """Interleaved, so that no transform may leak from a row to the next."""
    kinds = [SamplingParams(**fields) for fields in CASES.values()] + [SamplingParams(temperature=0)]
    each = 4_000
    mixed = [row for same in zip(*(rows_of(p, each) for p in kinds), strict=True) for row in same]
    got = draws(mixed).reshape(each, len(kinds))
    for column, params in enumerate(kinds):
        law = exact_law(LOGITS, params, PROMPT, OUTPUT + PATH, len(OUTPUT + PATH), STOPS)
        assert_law(got[:, column], law)


def test_a_large_vocabulary_keeps_its_law(exact_law):
    """Three tokens hold nearly all mass among 3,000: noise is made for the able ones alone."""
    logits = [-30.0] * 3000
    logits[5], logits[2000], logits[2999] = 1.0, 0.5, 0.0
    got = draws(rows_of(SamplingParams(), 5_000), logits)
    assert_law(got, exact_law(logits, SamplingParams()))


def test_the_law_test_sees_a_wrong_temperature(exact_law):
    law = exact_law(LOGITS, SamplingParams(temperature=1.1))
    with pytest.raises(AssertionError, match="wrong law"):
        assert_law(draws(rows_of(SamplingParams())), law)
