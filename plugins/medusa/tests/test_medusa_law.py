"""Under ``standard`` a tree has the target's law, though nodes of a level share their children's draws."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from specdec_medusa.testing import write_heads
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
    return target, write_heads(root / "heads", "medusa-1", target, heads=3)


def run(table, **keys):
    target, heads = table
    return generate(target, {"model": str(heads), **keys})


@pytest.mark.parametrize(
    "keys",
    [
        {"speculative_token_tree": TREE},
        {"speculative_token_tree": TREE, "draft_sample_method": "greedy"},
        {},
    ],
    ids=["tree", "tree-of-best", "chain"],
)
def test_the_law_of_every_offset(table, keys):
    outputs, metrics = run(table, rejection_sample_method="standard", **keys)
    assert assert_law_of_every_offset(answers_of(outputs), law(0.8)) == {0, 1, 2, 3}
    assert metrics["specdecode:drafts_dropped_by_fault"] == 0


def test_typical_acceptance_takes_more_of_a_tree(table):
    """The opt-in lossy mode: more drafts are accepted, and outputs say what they are."""
    keys = {"speculative_token_tree": TREE}
    exact, strict = run(table, **keys)
    outputs, loose = run(table, rejection_sample_method="typical", **keys)
    name = "vllm:spec_decode_num_accepted_tokens"
    rates = [m[name] / m["vllm:spec_decode_num_drafts"] for m in (strict, loose)]
    assert rates[1] > rates[0] + 0.2
    assert all(output.metrics.lossy == "typical" for output in outputs)
    assert not any(output.metrics.lossy for output in exact)


def test_heads_that_know_the_law_draft_what_the_target_draws(tmp_path):
    """With its noise, each at the place of its token: not one draft is lost."""
    logits = LOGITS[:1].expand(VOCAB, VOCAB).contiguous()
    target = table_checkpoint(tmp_path / "target", logits, max_position_embeddings=256)
    stored = load_file(target / "model.safetensors")
    hidden = stored["model.embed_tokens.weight"].double()
    hidden = hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-6) * stored["model.norm.weight"]
    rows = (torch.linalg.pinv(hidden) @ logits.double()).T.float()  # of any state, the one law
    size = hidden.shape[1]
    tensors = {f"{head}.1.weight": rows.clone() for head in range(3)}
    tensors |= {f"{head}.0.linear.weight": torch.zeros(size, size) for head in range(3)}
    tensors |= {f"{head}.0.linear.bias": torch.zeros(size) for head in range(3)}
    heads = write_heads(tmp_path / "heads", "medusa-1", target, heads=3, fit=False, tensors=tensors)
    _, metrics = run((target, heads))
    drafted = metrics["vllm:spec_decode_num_draft_tokens"]
    assert metrics["vllm:spec_decode_num_accepted_tokens"] == drafted > 500
