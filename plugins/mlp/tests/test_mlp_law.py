"""Under ``standard`` chains and fixed trees tell their laws, and the output has the target's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from specdec_mlp.testing import write_speculator
from specdecode import LLM, SamplingParams
from specdecode.testing.laws import assert_law
from specdecode.testing.tiny import table_checkpoint

VOCAB = 8
LOGITS = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(21)) * 1.3
TREE = [[0], [1], [3], [0, 0], [0, 1], [1, 0], [1, 2], [0, 0, 0], [1, 0, 0], [1, 0, 1]]


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    root = tmp_path_factory.mktemp("law")
    target = table_checkpoint(root / "target", LOGITS, max_position_embeddings=256)
    return target, write_speculator(root / "s", target, n_predict=3)


def run(table, **keys):
    target, speculator = table
    config = {"model": str(speculator), **keys}
    options = {"max_num_seqs": 32, "num_gpu_blocks_override": 2000, "max_model_len": 128}
    prompts = [{"prompt_token_ids": [3 + i % 5, i % VOCAB]} for i in range(40)]
    params = [
        SamplingParams(temperature=0.8, seed=1000 + i, max_tokens=70, ignore_eos=True) for i in range(40)
    ]
    with LLM(
        str(target),
        dtype="float32",
        device="cpu",
        speculative_config=config,
        skip_tokenizer_init=True,
        **options,
    ) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        metrics = {metric.name: metric.value for metric in llm.get_metrics()}
    return outputs, metrics


def by_offset(outputs):
    """Tokens behind each token, by how many drafts were accepted before them in their step."""
    seen = {}
    for output in outputs:
        completion, last, offset = output.outputs[0], output.prompt_token_ids[-1], 0
        for token, source in zip(completion.token_ids, completion.token_sources, strict=True):
            seen.setdefault(offset, []).append((last, token))
            last, offset = token, 0 if source == "target" else offset + 1
    return seen


@pytest.mark.parametrize(
    "keys",
    [
        {"speculative_token_tree": TREE},
        {"tree_top_k": 3, "num_speculative_tokens": 8},
        {},
    ],
    ids=["tree", "grown", "chain"],
)
def test_the_law_of_every_offset(table, keys):
    outputs, metrics = run(table, rejection_sample_method="standard", **keys)
    law = (LOGITS.double() / 0.8).softmax(-1).numpy()
    seen = by_offset(outputs)
    assert set(seen) == {0, 1, 2, 3}
    for pairs in seen.values():
        lasts, tokens = np.array(pairs).T
        for last in set(lasts.tolist()):
            assert_law(tokens[lasts == last], law[last])
    assert metrics["specdecode:drafts_dropped_by_fault"] == 0


def test_a_speculator_that_knows_the_law_drafts_what_the_target_draws(tmp_path):
    """With its noise, each at the place of its token: not one draft is lost."""
    target = table_checkpoint(
        tmp_path / "target", LOGITS[:1].expand(VOCAB, VOCAB).contiguous(), max_position_embeddings=256
    )
    one = torch.nn.functional.gelu(torch.ones(1))  # what the norm is made to give
    tensors = {"speculator.ln.0.weight": torch.zeros(32), "speculator.ln.0.bias": torch.ones(32)}
    tensors["speculator.head.0.weight"] = LOGITS[0][:, None].expand(VOCAB, 32) / (32 * one)
    path = write_speculator(tmp_path / "s", target, n_predict=3, tied=True, fit=False, tensors=tensors)
    _, metrics = run((target, path))
    drafted = metrics["vllm:spec_decode_num_draft_tokens"]
    assert metrics["vllm:spec_decode_num_accepted_tokens"] == drafted > 500
