"""Losses, held-out acceptance, vocabularies and files of checkpoints, each against what it says."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from specdec_train import losses
from specdec_train.corpus import Corpus
from specdec_train.evaluation import HeldOut
from specdec_train.losses import soft_cross_entropy
from specdec_train.publishing import write_checkpoint
from specdec_train.recipe import Checkpoint
from specdec_train.texts import Texts
from specdec_train.vocabulary import coverage, frequent_ids, vocabulary_maps
from specdecode.contract import ConfigError
from specdecode.models import load_weights


@pytest.mark.parametrize("chunk", [1, 70, 1 << 20])
def test_the_loss_and_its_gradient_do_not_depend_on_chunks(monkeypatch, chunk):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 8, generator=generator, requires_grad=True) for n in (9, 23))
    laws = torch.randn(11, 23, generator=generator)
    rows = torch.randint(0, 11, (9,), generator=generator)
    weights = torch.rand(9, generator=generator) * (torch.arange(9) % 3 > 0)
    monkeypatch.setattr(losses, "_CHUNK_ELEMENTS", chunk)
    loss, agree = soft_cross_entropy(hidden, weight, laws, rows, weights)
    (3 * loss).backward()
    got = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None
    logits = hidden @ weight.T
    plain = -((laws[rows].softmax(-1) * logits.log_softmax(-1)).sum(-1) * weights).sum()
    (3 * plain).backward()
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(got, (hidden.grad, weight.grad))
    assert torch.equal(agree, logits.argmax(-1) == laws[rows].argmax(-1))


class Scripted(torch.nn.Module):
    """Right about the first ``right`` tokens of each draft."""

    def __init__(self, right):
        super().__init__()
        self.right = right

    def drafts(self, batch, depth):
        levels = [batch.later(batch.ids, level + 1) + (level >= self.right) for level in range(depth)]
        return torch.stack(levels, -1)


@pytest.mark.parametrize("right", [0, 1, 2, 4])
def test_held_out_acceptance_walks_as_decoding_does(right):
    """Answers of 13 tokens: the first comes with the prompt, then each step gives right + 1 tokens."""
    texts = Texts.of([[5, 6, 7]] * 2, [list(range(20, 33)), list(range(40, 53))], [True] * 2, [True] * 2)
    nothing = SimpleNamespace(features=lambda rows, part: {})
    corpus = Corpus.of(texts, lambda ids: nothing, torch.device("cpu"))
    held_out = HeldOut(corpus, row_tokens=20, batch_rows=2, depth=4)
    found = held_out.evaluate(Scripted(right), torch.enable_grad())
    steps, left = [], 12
    while left:
        taken = min(right, left)
        steps.append(taken)
        left -= min(taken + 1, left)
    assert found.length == pytest.approx(1 + np.mean(steps))
    assert found.per_position == pytest.approx([np.mean([s > level for s in steps]) for level in range(4)])


def test_reduced_vocabularies_keep_what_is_frequent():
    counts = torch.tensor([5, 0, 9, 5, 1])
    ids = frequent_ids(counts, 2)
    assert ids.tolist() == [0, 2]  # a tie: the lower id
    assert coverage(counts, ids) == pytest.approx(14 / 20)
    maps = vocabulary_maps(ids, 5)
    assert (torch.arange(2) + maps["d2t"]).tolist() == [0, 2]
    assert maps["t2d"].tolist() == [True, False, True, False, False]
    with pytest.raises(ConfigError, match="between 1 and the target's 5"):
        frequent_ids(counts, 6)


def test_checkpoints_are_written_whole_in_shards_with_what_is_copied(tmp_path):
    tensors = {f"layer.{i}.weight": torch.randn(4, 8) for i in range(5)} | {"d2t": torch.arange(7)}
    (tmp_path / "target").mkdir()
    (tmp_path / "target/tokenizer.json").write_text("{}")
    made = Checkpoint(config={"a": 1}, tensors=tensors, copied=("tokenizer.json", "not_there.txt"))
    path = write_checkpoint(made, tmp_path / "c", tmp_path / "target", dtype=torch.bfloat16, shard_bytes=150)
    assert json.loads((path / "config.json").read_text()) == {
        "a": 1,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }
    assert len(list(path.glob("model-*-of-*.safetensors"))) == 3
    stored = dict(load_weights(path))
    assert stored.keys() == tensors.keys() and stored["d2t"].dtype == torch.int64
    assert all(torch.equal(stored[name], tensor.to(stored[name].dtype)) for name, tensor in tensors.items())
    assert stored["layer.0.weight"].dtype == torch.bfloat16
    assert (path / "tokenizer.json").is_file() and not (path / "not_there.txt").exists()
    write_checkpoint(made, path, tmp_path / "target", dtype=torch.bfloat16)  # in one file, the others gone
    assert [file.name for file in path.glob("*.safetensors")] == ["model.safetensors"]
    assert not (path / "model.safetensors.index.json").exists()
