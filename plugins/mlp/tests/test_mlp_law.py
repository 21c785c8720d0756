"""Under ``standard`` chains and fixed trees tell their laws, and the output has the target's."""

from __future__ import annotations

import pytest
import torch
from specdec_mlp.testing import write_speculator
from specdecode.testing.offset_laws import (
    LOGITS,
    VOCAB,
    answers_of,
    assert_law_of_every_offset,
    generate,
    law,
    law_target,
)
from specdecode.testing.tiny import table_checkpoint

TREE = [[0], [1], [3], [0, 0], [0, 1], [1, 0], [1, 2], [0, 0, 0], [1, 0, 0], [1, 0, 1]]


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    root = tmp_path_factory.mktemp("law")
    target = law_target(root / "target")
    return target, write_speculator(root / "s", target, n_predict=3)


def run(table, **keys):
    target, speculator = table
    return generate(target, {"model": str(speculator), **keys})


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
    assert assert_law_of_every_offset(answers_of(outputs), law(0.8)) == {0, 1, 2, 3}
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
