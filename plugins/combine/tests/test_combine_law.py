"""Rules that weigh probabilities: who drafts and how much was drafted bends no law."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from specdecode import SamplingParams
from specdecode.testing.laws import assert_law
from specdecode.testing.tiny import table_checkpoint

VOCAB = 8
LOGITS = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(21)) * 1.3


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
    return table_checkpoint(tmp_path_factory.mktemp("table") / "target", LOGITS, max_position_embeddings=256)


@pytest.mark.parametrize(
    ("name", "rule"),
    [*((name, "standard") for name in CASES), ("sure-or-other", "block"), ("drawn-then-lookup", "block")],
)
def test_the_law_of_every_offset(llm_of, metrics, table, name, rule):
    method, keys = CASES[name]
    llm = llm_of(
        {"method": method, **keys, "rejection_sample_method": rule},
        model=table,
        max_num_seqs=32,
        num_gpu_blocks_override=2000,
        max_model_len=128,
        max_num_batched_tokens=512,
    )
    prompts = [{"prompt_token_ids": [i % VOCAB, (i // VOCAB) % VOCAB, i % VOCAB]} for i in range(48)]
    params = [
        SamplingParams(temperature=1.0, seed=1000 + i, max_tokens=90, ignore_eos=True) for i in range(48)
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    law = LOGITS.double().softmax(-1).numpy()
    seen: dict[int, list[tuple[int, int]]] = {}
    for prompt, output in zip(prompts, outputs, strict=True):
        last, offset = prompt["prompt_token_ids"][-1], 0
        completion = output.outputs[0]
        for token, source in zip(completion.token_ids, completion.token_sources, strict=True):
            seen.setdefault(offset, []).append((last, token))
            last, offset = token, 0 if source == "target" else offset + 1
    assert set(seen) >= {0, 1, 2}
    for pairs in seen.values():
        lasts, tokens = np.array(pairs).T
        for last in set(lasts.tolist()):
            assert_law(tokens[lasts == last], law[last])
    found = metrics(llm)
    assert found["specdecode:drafts_dropped_by_fault"] == found["specdecode:proposer_failures"] == 0
    drafted = [value for key, value in found.items() if key.endswith(".draft_tokens") and key.count(".") == 3]
    assert len(drafted) == 2 and drafted[0] > 0 and (drafted[1] > 0 or name == "untold")
