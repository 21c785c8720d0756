"""The sampler written out for the reference, against values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from specdecode import SamplingParams
from specdecode.testing.laws import assert_law
from specdecode.testing.plain_sampling import Draw, NoToken, next_token
from specdecode.testing.reference import signed_seed

LOGITS = torch.tensor([1.0, 3.0, 2.5, -1.0, 2.9])


def draw(logits=LOGITS, output=(), prompt=(0,), seed=0, index=0, **params):
    others = {name: params.pop(name) for name in ("eos_ids", "bad_words", "processors") if name in params}
    wish = SamplingParams(**{"temperature": 0, **params})
    return next_token(
        logits,
        Draw(params=wish, prompt_ids=prompt, output_ids=output, seed=seed, index=index, **others),
    )


@pytest.mark.parametrize(
    ("wish", "token"),
    [
        ({}, 1),
        ({"allowed_token_ids": [0, 3]}, 0),
        ({"logit_bias": {3: 5.0}}, 3),
        ({"bad_words": [[1]]}, 4),
        ({"bad_words": [[4, 1]], "output": [4]}, 4),
        ({"bad_words": [[4, 1]], "output": [4, 2]}, 1),
        ({"bad_words": [[4, 1]], "prompt": [4]}, 1),  # the prompt does not count
        ({"min_tokens": 2, "eos_ids": [1], "output": [0]}, 4),
        ({"min_tokens": 2, "eos_ids": [1], "output": [0, 0]}, 1),
        ({"min_tokens": 2, "stop_token_ids": [1], "allowed_token_ids": [1]}, 1),  # else nothing is left
        ({"presence_penalty": 0.2, "output": [1, 1, 1]}, 4),
        ({"presence_penalty": 0.2, "prompt": [1]}, 1),
        ({"frequency_penalty": 0.2, "output": [1, 1, 1, 4]}, 4),
        ({"repetition_penalty": 1.1, "prompt": [1]}, 4),
        ({"repetition_penalty": 0.1, "prompt": [3, 0]}, 0),  # 1 / 0.1, and -1 * 0.1
        ({"processors": [lambda output, logits: -logits]}, 3),
        ({"processors": [lambda prompt, output, logits: logits.roll(prompt[0])], "prompt": [2]}, 3),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else str(value),
)
def test_one_transform(wish, token):
    assert draw(**wish) == token


def test_equal_scores():
    assert draw(torch.tensor([0.0, 2.0, 2.0])) == 1


def test_no_token_is_left():
    with pytest.raises(NoToken, match="no token is left"):
        draw(allowed_token_ids=[1], bad_words=[[1]])
    with pytest.raises(NoToken, match="NaN"):
        draw(torch.tensor([0.0, math.nan]))
    with pytest.raises(NoToken, match="RuntimeError: why"):
        draw(processors=[raises])


def raises(output_ids, logits):
    raise RuntimeError("why")


@pytest.mark.parametrize(
    ("wish", "kept"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"temperature": 2.0}, [0, 1, 2, 3, 4]),
        ({"top_k": 2}, [1, 4]),
        ({"top_p": 0.6}, [1, 4]),  # 0.38 and 0.34
        ({"top_p": 0.3}, [1]),
        ({"min_p": 0.5}, [1, 2, 4]),  # exp(-0.5) = 0.61
        ({"min_p": 0.7}, [1, 4]),
        ({"top_k": 3, "top_p": 0.75}, [1, 4]),  # of what top_k left: 0.42, 0.38
    ],
    ids=str,
)
def test_the_law_of_a_draw(wish, kept):
    temperature = wish.get("temperature", 1.0)
    weights = [math.exp(float(LOGITS[token]) / temperature) * (token in kept) for token in range(5)]
    draws = [draw(seed=seed, **{"temperature": 1.0, **wish}) for seed in range(400)]
    assert_law(draws, [weight / sum(weights) for weight in weights])


def test_ties_stay_together():
    tied = torch.tensor([1.0, 1.0, 1.0, 0.0])
    for wish in ({"top_k": 1}, {"top_p": 0.01}, {"min_p": 1.0}):
        assert {draw(tied, seed=seed, temperature=1.0, **wish) for seed in range(60)} == {0, 1, 2}


def test_what_keys_the_noise():
    def draws(**key):
        return [draw(torch.zeros(50), temperature=1.0, **key) for _ in range(2)]

    base = draws(seed=3)
    assert base[0] == base[1]
    others = [draws(seed=4), draws(seed=3, index=1), draws(seed=3, output=[7]), draws(seed=3, prompt=[0, 0])]
    assert sum(other != base for other in others) >= 3
    assert draws(seed=3, prompt=[0, 0]) == draws(seed=3, output=[9])  # position alone counts


def test_seeds_are_taken_modulo_two_to_the_64():
    assert signed_seed(-1 % 2**64) == signed_seed(2**64 - 1) == -1
    assert signed_seed(2**64 + 5) == signed_seed(5) == 5
    assert signed_seed(2**63) == -(2**63)
