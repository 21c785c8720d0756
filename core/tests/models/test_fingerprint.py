"""Which model it is, whatever file it came in."""

import json

import torch
from safetensors.torch import load_file, save_file
from specdecode.models import fingerprint, resolve_model
from specdecode.testing.tiny import tiny_checkpoint


def test_copies_agree_and_other_models_do_not(tmp_path):
    path = tiny_checkpoint(tmp_path / "a")
    known = fingerprint(resolve_model(path))
    assert known is not None and len(known) == 16
    file = path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].bfloat16().float()
    bfloat16 = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(bfloat16, file, {"format": "pt"})
    known = fingerprint(resolve_model(path))
    save_file({name: tensor.float() for name, tensor in bfloat16.items()}, file, {"format": "pt"})
    assert fingerprint(resolve_model(path)) == known

    changed = {**tensors, "model.norm.weight": tensors["model.norm.weight"] + 1 / 64}
    save_file(changed, file, {"format": "pt"})
    assert fingerprint(resolve_model(path)) != known
    save_file(tensors, file, {"format": "pt"})
    assert fingerprint(resolve_model(path)) == known
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "vocab_size": 301}))
    assert fingerprint(resolve_model(path)) != known


def test_what_has_no_final_norm_of_that_name_has_none(tmp_path):
    path = tiny_checkpoint(tmp_path)
    save_file({"transformer.ln_f.weight": torch.ones(64)}, path / "model.safetensors", {"format": "pt"})
    assert fingerprint(resolve_model(path)) is None
