"""H23: vocabularies that differ by padding are one, whichever is larger; what differs in an entry is none."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from specdecode.contract import SpecdecodeError

TOKENS = 300
TABLE = 8


def padded(source, folder, size, *, tempting):
    """A copy with ``size`` rows in its embeddings; what is beyond the tokenizer would win every draw."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    generator = torch.Generator().manual_seed(1)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows = torch.zeros(size - TOKENS, tensors[name].shape[1])
        if tempting:
            rows = 50 * torch.randn(rows.shape, generator=generator)
        tensors[name] = torch.cat((tensors[name], rows))
    save_file(tensors, file, metadata={"format": "pt"})
    fields = json.loads((folder / "config.json").read_text("utf-8")) | {"vocab_size": size}
    (folder / "config.json").write_text(json.dumps(fields), "utf-8")
    return folder


@pytest.mark.parametrize("sizes", [(304, 320), (320, 304)])
def test_h23_a_draft_model_padded_otherwise(faults, same, fault_lab, tmp_path, sizes):
    pytest.importorskip("specdec_draft")
    ours = padded(fault_lab.lab.target, tmp_path / "ours", sizes[0], tempting=False)
    theirs = padded(fault_lab.lab.target, tmp_path / "theirs", sizes[1], tempting=True)
    asks = [faults.ask(faults.prompt(index), max_tokens=30, ignore_eos=True) for index in range(3)]
    config = {"method": "draft_model", "model": str(theirs), "num_speculative_tokens": 4}
    engine = faults.engine(config, model=str(ours))
    same(engine.generate(asks), faults.engine(model=str(ours)).generate(asks))
    assert engine.drafted == engine.accepted > 50
    assert all(token < TOKENS for record in engine.recording.drafts for token in record.ids)


@pytest.mark.parametrize("rows", [288, 320])
def test_h23_a_head_padded_otherwise(faults, same, fault_lab, tmp_path, rows):
    """``embed_tokens`` and ``lm_head`` of a head with fewer rows than the target, or more."""
    testing = pytest.importorskip("specdec_eagle.testing")
    import torch

    tensors = {
        name: 0.1 * torch.randn(rows, 64, generator=torch.Generator().manual_seed(seed))
        for seed, name in enumerate(("embed_tokens.weight", "lm_head.weight"))
    }
    head = testing.write_head(
        tmp_path / "head",
        "eagle3",
        fault_lab.lab.target,
        tensors=tensors,
        vocab_size=rows,
        draft_vocab_size=rows,
        eagle_aux_hidden_state_layer_ids=[0, 1, 2],
    )
    asks = [faults.ask(faults.prompt(index), max_tokens=20, ignore_eos=True) for index in range(3)]
    engine = faults.engine({"method": "eagle3", "model": str(head), "num_speculative_tokens": 3})
    same(engine.generate(asks), faults.base(asks))
    drafted = [token for record in engine.recording.drafts for token in record.ids]
    assert drafted and max(drafted) < TOKENS


@pytest.mark.parametrize("rule", ["invariant", "standard"])
def test_h23_the_law_stands_between_padded_vocabularies(faults, fault_lab, rule):
    """8 tokens, the target's logits 12 wide and the draft's 16, whose padding it would like to draft."""
    pytest.importorskip("specdec_draft")
    import torch
    from specdecode.testing.laws import assert_law

    generator = torch.Generator().manual_seed(4)
    laws = torch.randn(2, TABLE, TABLE, generator=generator) * 1.3
    paths = []
    for logits, size, beyond in ((laws[0], 12, -40.0), (laws[1], 16, 5.0)):
        table = torch.full((size, size), -40.0)
        table[:, TABLE:] = beyond
        table[:TABLE, :TABLE] = logits
        paths.append(fault_lab.table(table))
    from pathlib import Path

    small = Path(fault_lab.table(laws[0])) / "tokenizer.json"
    for path in paths:
        shutil.copy(small, Path(path) / "tokenizer.json")
    asks = [
        faults.ask([3 + i % 5, i % TABLE], temperature=1.0, seed=i, max_tokens=80, ignore_eos=True)
        for i in range(40)
    ]
    config = {
        "method": "draft_model",
        "model": paths[1],
        "num_speculative_tokens": 3,
        "rejection_sample_method": rule,
    }
    engine = faults.engine(config, model=paths[0], recorded=False)
    law = laws[0].double().softmax(-1).numpy()
    drawn = {}
    for ask, output in zip(asks, engine.generate(asks), strict=True):
        (completion,) = output.outputs
        last, offset = ask.prompt[-1], 0
        for token, source in zip(completion.token_ids, completion.token_sources, strict=True):
            drawn.setdefault((offset, last), []).append(token)
            last, offset = token, 0 if source == "target" else offset + 1
    assert {offset for offset, _ in drawn} == {0, 1, 2, 3}
    for (_, last), tokens in drawn.items():
        assert_law(np.array(tokens), law[last])
    assert engine.accepted > 500 and not engine.metric("specdecode:drafts_dropped_by_fault")


@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_h23_two_swapped_entries_are_named(faults, fault_lab, tmp_path, monkeypatch, method):
    from specdecode import models

    target = fault_lab.lab.target
    if method == "draft_model":
        pytest.importorskip("specdec_draft")
        own = shutil.copytree(target, tmp_path / "own")
    else:
        testing = pytest.importorskip("specdec_eagle.testing")
        layers = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
        own = testing.write_head(tmp_path / "own", "eagle3", target, **layers)
    content = json.loads((target / "tokenizer.json").read_text("utf-8"))
    vocab = content["model"]["vocab"]
    first, second = sorted(vocab, key=vocab.get)[40:42]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (own / "tokenizer.json").write_text(json.dumps(content), "utf-8")
    monkeypatch.setattr(models, "load_model", lambda *_, **__: pytest.fail("weights were loaded"))
    with pytest.raises(SpecdecodeError, match=r"(id|token) 40 is") as raised:
        faults.engine({"method": method, "model": str(own), "num_speculative_tokens": 3}, recorded=False)
    assert repr(first) in str(raised.value) and repr(second) in str(raised.value)
