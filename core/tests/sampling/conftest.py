"""The law of one row, written by hand in Python floats: what all sampler tests compare with."""

import math
from collections import Counter

import pytest
import torch


def _softmax(logits):
    best = max(logits)
    weights = [math.exp(x - best) for x in logits]
    return [w / sum(weights) for w in weights]


def _edited(logits, params, prompt, output, num_output, stop_ids):
    """Logits after everything that greedy rows have too."""
    x = list(map(float, logits))
    ids = range(len(x))
    out = -math.inf
    allowed = set(ids) if params.allowed_token_ids is None else set(params.allowed_token_ids)
    x = [x[i] if i in allowed else out for i in ids]
    stops = set(stop_ids) | set(params.stop_token_ids)
    if num_output < params.min_tokens and not allowed <= stops:
        x = [out if i in stops else x[i] for i in ids]
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    counts = Counter(output)
    for token in set(prompt) | set(output):
        factor = params.repetition_penalty
        x[token] = x[token] / factor if x[token] > 0 else x[token] * factor
        x[token] -= params.frequency_penalty * counts[token]
        x[token] -= params.presence_penalty * (token in counts)
    return x


def _law(logits, params, prompt=(), output=(), num_output=0, stop_ids=()):
    x = _edited(logits, params, prompt, output, num_output, stop_ids)
    ids = range(len(x))
    if params.greedy:
        return [float(i == x.index(max(x))) for i in ids]
    x = [value / params.temperature for value in x]
    if params.min_p > 0:
        probs = _softmax(x)
        x = [x[i] if probs[i] >= params.min_p * max(probs) * (1 - 1e-9) else -math.inf for i in ids]
    if 0 < params.top_k < len(x):
        smallest = sorted(x, reverse=True)[params.top_k - 1]
        x = [value if value >= smallest else -math.inf for value in x]
    if params.top_p < 1:
        probs = _softmax(x)
        mass, smallest = 0.0, None
        for i in sorted(ids, key=lambda i: -x[i]):
            if mass >= params.top_p:
                break
            mass, smallest = mass + probs[i], x[i]
        x = [value if value >= smallest else -math.inf for value in x]
    return _softmax(x)


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def exact_law():
    """``exact_law(logits, params, prompt, output, num_output, stop_ids) -> probabilities``, one row."""
    return _law


@pytest.fixture(scope="session")
def exact_logits():
    """As ``exact_law``, up to and with the penalties."""
    return _edited
