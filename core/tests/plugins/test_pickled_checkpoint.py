"""Pickled draft checkpoints: headers without torch, nothing run, and the same tensors when they load."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from specdecode.contract import ConfigError, TensorInfo
from specdecode.models import load_weights
from specdecode.plugins import read_checkpoint
from specdecode.plugins.pickles import pickled_array

TENSORS = {
    "a.weight": torch.randn(3, 4),
    "a.bias": torch.nn.Parameter(torch.randn(3).bfloat16(), requires_grad=False),
    "half": torch.randn(2, 2).half(),
    "map": torch.arange(20)[5:15],
    "kept": torch.tensor([True, False]),
}
HEADERS = {
    "a.weight": TensorInfo((3, 4), "float32"),
    "a.bias": TensorInfo((3,), "bfloat16"),
    "half": TensorInfo((2, 2), "float16"),
    "map": TensorInfo((10,), "int64"),
    "kept": TensorInfo((2,), "bool"),
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def fault(path):
    with pytest.raises(ConfigError) as raised:
        read_checkpoint(path, field="model")
    return str(raised.value)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "medusa_lm_head.pt"])
def test_headers_and_tensors(folder, name):
    torch.save(TENSORS, folder / name)
    torch.save({"lr": 0.1}, folder / "training_args.bin")  # a training run leaves it there
    assert read_checkpoint(folder).tensors == HEADERS
    loaded = dict(load_weights(folder))
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())
    assert [name for name, _ in load_weights(folder, {"map"})] == ["map"]
    assert pickled_array(folder / name, "map").tolist() == list(range(5, 15))
    assert np.array_equal(pickled_array(folder / name, "kept"), [True, False])
    assert pickled_array(folder / name, "absent") is None


def test_headers_are_read_without_torch(folder):
    torch.save(TENSORS, folder / "pytorch_model.bin")
    code = (
        "import sys; from specdecode.plugins import read_checkpoint; "
        f"print(len(read_checkpoint({str(folder)!r}).tensors), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["5", "False"]


def test_shards(folder):
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "1.bin", "y": "2.bin"}}))
    torch.save({"x": torch.ones(1)}, folder / "1.bin")
    assert "names 2.bin, missing there" in fault(folder)
    torch.save({"y": torch.ones(2)}, folder / "2.bin")
    assert set(read_checkpoint(folder).tensors) == {"x", "y"} == set(dict(load_weights(folder)))
    index.write_text("[]")
    assert "index.json cannot be read" in fault(folder)


def test_several_pickles_are_not_guessed_among(folder):
    for name in ("one.pt", "two.pt"):
        torch.save(TENSORS, folder / name)
    assert "several pickles (one.pt, two.pt); keep the one with the weights" in fault(folder)


class Evil:
    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return (self.file.touch, ())


def test_nothing_is_run(folder):
    torch.save({"a": Evil(folder / "ran")}, folder / "a.pt")
    assert "is no part of a tensor" in fault(folder)
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("content", [[torch.ones(1)], {"a": 1}, {"a": {"b": torch.ones(1)}}])
def test_what_is_no_state_dict(folder, content):
    torch.save(content, folder / "a.pt")
    assert "must hold a mapping from names to tensors" in fault(folder)


def test_a_damaged_file(folder):
    torch.save(TENSORS, folder / "a.pt")
    whole = (folder / "a.pt").read_bytes()
    (folder / "a.pt").write_bytes(whole[: len(whole) // 2])
    assert "is no pickle of torch 1.6 or later" in fault(folder)
