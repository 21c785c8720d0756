"""The rules that weigh probabilities, with a draft model that tells them."""

import numpy as np
import pytest
import torch
from specdecode.testing.offset_laws import LOGITS, VOCAB, answers_of, assert_law_of_every_offset, law

RULES = ("standard", "block")
OTHERS = LOGITS + torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(22))


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """A target and a draft of 8 tokens whose laws are known; and both with padded vocabularies."""
    from specdecode.testing.tiny import table_checkpoint

    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("tables")
    made = {}
    for name, logits, size in (
        ("target", LOGITS, VOCAB),
        ("draft", OTHERS, VOCAB),
        ("padded", LOGITS, 12),
        ("wide", OTHERS, 16),
    ):
        table = torch.full((size, size), -40.0)
        table[:VOCAB, :VOCAB] = logits
        if name == "wide":
            table[:, VOCAB:] = 5.0  # a draft that would like to draft its padding
        made[name] = table_checkpoint(root / name, table, max_position_embeddings=256)
    for name in ("padded", "wide"):
        tokenizer = (made["target"] / "tokenizer.json").read_text("utf-8")
        (made[name] / "tokenizer.json").write_text(tokenizer, "utf-8")
    return made


def filtered(logits, temperature, top_k):
    """``[VOCAB, VOCAB]``: the law behind each token, written out anew."""
    law = (logits.double() / temperature).softmax(-1).numpy()
    for row in law:
        row[np.argsort(-row)[top_k:]] = 0
    return law / law.sum(-1, keepdims=True)


def asked(kit, count, **params):
    return [
        kit.ask([3 + i % 5, i % VOCAB], **({"temperature": 1.0, "seed": 1000 + i, "max_tokens": 90} | params))
        for i in range(count)
    ]


PAIRS = [("target", "draft"), ("padded", "draft"), ("target", "wide"), ("padded", "wide")]


@pytest.mark.parametrize(
    ("rule", "pair"),
    # Padding is masked before any rule sees it, so one rule stands for all.
    [*(("standard", pair) for pair in PAIRS), ("invariant", PAIRS[3]), ("block", PAIRS[0])],
)
def test_the_law_of_every_offset(kit, llm_of, tables, rule, pair):
    """Also where either vocabulary is padded: H23."""
    ours, theirs = pair
    llm = llm_of(
        tables[ours], tables[theirs], 3, {"rejection_sample_method": rule},
        max_num_seqs=32, num_gpu_blocks_override=2000, max_model_len=128,
    )  # fmt: skip
    asks = asked(kit, 60, temperature=0.8, top_k=6)
    outputs = kit.generate(llm, asks)
    wanted = filtered(LOGITS, 0.8, 6)
    assert assert_law_of_every_offset(answers_of(outputs), wanted) == set(range(4))
    assert kit.metric(llm, "specdecode:drafts_dropped_by_fault") == 0
    if rule != "invariant":  # min(p, q) summed, what the rule promises of a first draft
        share = np.minimum(wanted, filtered(OTHERS, 0.8, 6)).sum(-1)
        per_position = kit.metric(llm, "vllm:spec_decode_num_accepted_tokens_per_pos")
        rate = per_position[0] / kit.metric(llm, "vllm:spec_decode_num_drafts")
        assert share.min() - 0.02 < rate < share.max() + 0.02


@pytest.mark.parametrize("rule", RULES)
def test_the_target_as_its_own_draft_is_always_accepted(kit, llm_of, tables, rule):
    llm = llm_of(tables["target"], tables["target"], 3, {"rejection_sample_method": rule}, max_model_len=128)
    kit.generate(llm, asked(kit, 8, max_tokens=40))
    drafted = kit.metric(llm, "vllm:spec_decode_num_draft_tokens")
    assert kit.metric(llm, "vllm:spec_decode_num_accepted_tokens") == drafted > 100


def test_a_best_token_is_a_point_mass(kit, llm_of, tables):
    """``draft_sample_method="greedy"`` under a rule that weighs: the law stands, without probabilities."""
    spec = {"rejection_sample_method": "standard", "draft_sample_method": "greedy"}
    llm = llm_of(
        tables["target"], tables["draft"], 3, spec,
        max_num_seqs=32, num_gpu_blocks_override=2000, max_model_len=128,
    )  # fmt: skip
    outputs = kit.generate(llm, asked(kit, 60))
    assert_law_of_every_offset(answers_of(outputs), law())
    assert kit.metric(llm, "vllm:spec_decode_num_accepted_tokens") > 500
