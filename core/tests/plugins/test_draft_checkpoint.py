"""A draft checkpoint is read by its headers, and every fault of it names the file."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file
from specdecode.contract import ConfigError, TensorInfo
from specdecode.plugins import read_checkpoint


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "toy"}')
    return tmp_path


def fault(path, **options):
    with pytest.raises(ConfigError) as raised:
        read_checkpoint(path, **options)
    return str(raised.value)


def test_config_and_headers(folder):
    save_file({"fc.weight": np.zeros((2, 3), np.float16)}, folder / "model.safetensors")
    save_file({"left.over": np.zeros(1, np.float32)}, folder / "other.safetensors")
    info = read_checkpoint(folder)
    assert (info.path, info.config) == (folder, {"model_type": "toy"})
    assert info.tensors == {"fc.weight": TensorInfo((2, 3), "float16")}


def test_files_of_other_names_are_read_where_there_is_no_model(folder):
    save_file({"0.weight": np.zeros((4,), np.int64)}, folder / "medusa_lm_head.safetensors")
    assert read_checkpoint(str(folder)).tensors == {"0.weight": TensorInfo((4,), "int64")}


def test_shards_come_from_the_index(folder):
    (folder / "model.safetensors.index.json").write_text("{}")
    assert "model.safetensors.index.json has no weight_map" in fault(folder)
    weight_map = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    save_file({"a": np.zeros(1, np.float32)}, folder / "model-1.safetensors")
    assert "model.safetensors.index.json names model-2.safetensors, missing in" in fault(folder)
    save_file({"b": np.zeros(2, np.float32)}, folder / "model-2.safetensors")
    assert set(read_checkpoint(folder).tensors) == {"a", "b"}


def test_a_truncated_file(folder):
    save_file({"a": np.zeros(100, np.float32)}, folder / "model.safetensors")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    assert f"{folder / 'model.safetensors'} cannot be read" in fault(folder)


def test_what_is_missing_is_named(tmp_path, folder):
    assert "holds no safetensors file" in fault(folder)
    (folder / "pytorch_model.bin").write_bytes(b"x")
    assert "pytorch_model.bin is no pickle of torch 1.6 or later" in fault(folder)
    (folder / "config.json").write_text("{")
    assert "config.json is not valid JSON" in fault(folder)
    (folder / "config.json").write_text("[]")
    assert "config.json must hold a JSON object, got list" in fault(folder)
    (folder / "config.json").unlink()
    assert "config.json does not exist" in fault(folder)
    (folder / "draft.gguf").write_bytes(b"GGUF")
    assert "must be a directory" in fault(folder / "draft.gguf")


@pytest.mark.parametrize("name", ["/no/such/folder", "./none/such"])
def test_a_path_that_does_not_exist_is_no_hub_id(name):
    message = fault(name, revision="main", field="speculative_config.model")
    assert message == f"speculative_config.model {name!r} does not exist; give the directory that holds it"


@pytest.mark.parametrize("name", ["acme/absent", "not a/valid/id"])
def test_a_name_that_is_neither_a_folder_nor_cached(name, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    message = fault(name, revision="main", field="speculative_config.model")
    assert message.startswith(f"speculative_config.model {name!r} at revision 'main' is neither a directory")
