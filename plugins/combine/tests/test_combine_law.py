"""Rules that weigh probabilities: who drafts and how much was drafted bends no law."""

from __future__ import annotations

import pytest
import torch
from specdecode import SamplingParams
from specdecode.testing.offset_laws import (
    ENGINE,
    VOCAB,
    answers_of,
    assert_law_of_every_offset,
    law,
    law_target,
)


def sampler(count, near, spread, seed=1, **keys):
    """A drafter with a table of its own: ``near`` times the target's, and a random part."""
    table = {"near": near, "spread": spread, "seed": seed}
    return {"method": "scripted-sampler", "num_speculative_tokens": count, **table, **keys}


CLOSE, FAR = sampler(3, 0.5, 1.5), sampler(3, 0.0, 2.5, seed=2)
#: By what it drew it would be chosen for its likeliest tokens: at offset 0 the p-value would be 2e-10.
SURE = {"method": "telling", "inner": sampler(1, 1.0, 0.3), "recording": "none"}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
CASES = {
    "sure-or-other": ("cascade", {"proposers": [SURE, FAR], "min_score": 0.45}),
    "lookup-or-drawn": ("cascade", {"proposers": [NGRAM, CLOSE], "min_score": 1.0}),
    # The first tells no laws and draws: its drafts are taken for point masses, and so are the others.
    "untold": ("cascade", {"proposers": [{**CLOSE, "tells": "nothing"}, FAR]}),
    "drawn-then-lookup": ("extend", {"proposers": [CLOSE, NGRAM]}),
    "learnt": ("auto", {"proposers": [NGRAM, CLOSE], "trial_steps": 8}),
}


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    torch.set_num_threads(1)
    return law_target(tmp_path_factory.mktemp("table") / "target")


@pytest.mark.parametrize(
    ("name", "rule"),
    [*((name, "standard") for name in CASES), ("sure-or-other", "block"), ("drawn-then-lookup", "block")],
)
def test_the_law_of_every_offset(llm_of, metrics, table, name, rule):
    method, keys = CASES[name]
    llm = llm_of(
        {"method": method, **keys, "rejection_sample_method": rule},
        model=table,
        **ENGINE,
    )
    prompts = [{"prompt_token_ids": [i % VOCAB, (i // VOCAB) % VOCAB, i % VOCAB]} for i in range(48)]
    params = [
        SamplingParams(temperature=1.0, seed=1000 + i, max_tokens=90, ignore_eos=True) for i in range(48)
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert assert_law_of_every_offset(answers_of(outputs), law()) >= {0, 1, 2}
    found = metrics(llm)
    assert found["specdecode:drafts_dropped_by_fault"] == found["specdecode:proposer_failures"] == 0
    drafted = [value for key, value in found.items() if key.endswith(".draft_tokens") and key.count(".") == 3]
    assert len(drafted) == 2 and drafted[0] > 0 and (drafted[1] > 0 or name == "untold")
