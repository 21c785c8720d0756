"""Weights come from their files into a model's tensors, by several threads where a GPU waits for them."""

from __future__ import annotations

import logging

import pytest
import torch
from safetensors.torch import save_file
from specdecode.contract import ConfigError
from specdecode.distributed import Share
from specdecode.models.transfer import Turn, read_in_turns, read_weights, transfer
from specdecode.models.weights import stored_tensors

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture
def stored(tmp_path):
    """Tensors of several sizes and dtypes in two files, and the same as a checkpoint."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "matrix": torch.randn(37, 19, generator=generator),
        "half": torch.randn(64, 8, generator=generator).bfloat16(),
        "vector": torch.randn(5, generator=generator).half(),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "large": torch.randn(1000, 33, generator=generator).bfloat16(),
    }
    names = list(tensors)
    save_file({name: tensors[name] for name in names[:3]}, tmp_path / "a.safetensors", {"format": "pt"})
    save_file({name: tensors[name] for name in names[3:]}, tmp_path / "b.safetensors")
    return tmp_path, tensors


def test_headers_tell_where_tensors_lie(stored):
    path, tensors = stored
    found = {entry.name: entry for entry in stored_tensors(path)}
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        entry = found[name]
        assert (entry.shape, entry.dtype, entry.num_bytes) == (tensor.shape, tensor.dtype, tensor.nbytes)
        raw = entry.file.read_bytes()[entry.offset : entry.offset + entry.num_bytes]
        assert raw == tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("threads", [1, 5])
def test_pieces_of_all_tensors_arrive(stored, device, threads):
    path, tensors = stored
    told = []
    # into float32 and bfloat16 alike, and into a part of a larger tensor, as those of a fused weight go
    whole = {name: torch.full((3, *t.shape), 7.0, device=device) for name, t in tensors.items()}
    same = {name: torch.empty_like(t, device=device) for name, t in tensors.items()}
    entries = list(stored_tensors(path))
    copies = [(e, whole[e.name][1]) for e in entries] + [(e, same[e.name]) for e in entries]
    transfer(copies, told.append, threads=threads, piece_bytes=64)
    assert sum(told) == 2 * sum(tensor.nbytes for tensor in tensors.values())
    for name, tensor in tensors.items():
        assert torch.equal(same[name].cpu(), tensor)
        assert torch.equal(whole[name][1].cpu(), tensor.float())
        assert (whole[name][0] == 7).all() and (whole[name][2] == 7).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("share", [Share(0, 5, 12, 37), Share(1, 3, 9, 19), Share(1, 18, 1, 19)])
def test_a_share_alone_is_read(stored, device, share):
    path, tensors = stored
    (entry,) = (entry for entry in stored_tensors(path) if entry.name == "matrix")
    part, want, told = entry.part(share), tensors["matrix"][share.index], []
    assert (part.shape, part.num_bytes) == (want.shape, want.nbytes)
    by_pieces, at_once = (torch.empty(want.shape, device=device) for _ in range(2))
    transfer([(part, by_pieces)], told.append, threads=2, piece_bytes=80)
    read_weights([(part, at_once)])
    assert sum(told) == want.nbytes
    assert torch.equal(by_pieces.cpu(), want) and torch.equal(at_once.cpu(), want)


def test_a_file_that_shrank_stops_all_threads(stored):
    path, tensors = stored
    entries = list(stored_tensors(path))
    file = path / "b.safetensors"
    file.write_bytes(file.read_bytes()[:-500])
    told = []
    copies = [(entry, torch.empty_like(tensors[entry.name])) for entry in entries]
    with pytest.raises(ConfigError, match=r"b\.safetensors cannot be read"):
        transfer(copies, told.append, threads=3, piece_bytes=64)
    assert sum(told) < sum(entry.num_bytes for entry in entries)


def test_a_dtype_that_torch_has_not(tmp_path):
    header = b'{"odd": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}'
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0")
    with pytest.raises(ConfigError, match="odd"):
        list(stored_tensors(tmp_path))


@pytest.mark.parametrize("level", [logging.WARNING, logging.CRITICAL])
def test_the_bar_is_for_what_is_large_and_follows_the_log(stored, capfd, monkeypatch, level):
    path, tensors = stored
    copies = [(entry, torch.empty_like(tensors[entry.name])) for entry in stored_tensors(path)]
    read_weights(copies)
    assert "weights" not in capfd.readouterr().err
    monkeypatch.setattr("specdecode.models.transfer._SHOWN_BYTES", 100)
    logger = logging.getLogger("specdecode.models.transfer")
    logger.setLevel(level)
    try:
        read_weights(copies)
    finally:
        logger.setLevel(logging.NOTSET)
    assert ("weights" in capfd.readouterr().err) == (level == logging.WARNING)


def test_turns_follow_each_other(stored):
    """Of a later one nothing is there before the one ahead is done."""
    path, tensors = stored
    entries, told = list(stored_tensors(path)), []

    def turn(number, own):
        def destinations():
            told.append(("begun", number))
            return [found.setdefault(entry.name, torch.empty_like(tensors[entry.name])) for entry in own]

        return Turn(own, destinations, lambda: told.append(("done", number)))

    found = {}
    read_in_turns([turn(0, entries[:1]), turn(1, []), turn(2, entries[1:])])
    assert told == [(what, number) for number in range(3) for what in ("begun", "done")]
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
