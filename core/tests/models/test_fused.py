"""The fused forward is the layers' forward but for rounding; it is what a GPU runs."""

from __future__ import annotations

import itertools

import pytest
import torch
from specdec_kernels.attention import AttentionMetadata
from specdecode.layers import TorchBackend
from specdecode.models import load_model, resolve_model
from specdecode.models.fused import SWITCH, can_fuse
from specdecode.testing.tiny import FAMILIES, tiny_checkpoint

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
VARIANTS = {
    **{family: (family, {}) for family in FAMILIES},
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "odd-sizes": ("llama", {"hidden_size": 48, "intermediate_size": 72, "head_dim": 16}),
    "window": ("mistral", {"sliding_window": 8}),
    "window-and-head-norms": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "attention_bias": True},
    ),
    "partial-rotary": ("llama", {"rope_parameters": {
        "rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5,
    }}),
}  # fmt: skip
TREE = (-1, -1, 0, 0, 1, 3)


@pytest.mark.parametrize("variant", VARIANTS)
def test_fused_equals_layers(variant, tmp_path, native, prompt, monkeypatch):
    family, overrides = VARIANTS[variant]
    path = tiny_checkpoint(tmp_path, family, **overrides)
    found = {}
    for switch in "01":
        monkeypatch.setenv(SWITCH, switch)
        model = native(path, block_size=16)
        assert model.decoder.fused == (switch == "1")
        boundaries = range(model.decoder.config.num_layers, -1, -1)
        steps = [
            model.feed({"a": prompt(30), "b": prompt(11, seed=1)}, taps=boundaries),
            model.feed(
                {"a": prompt(3, seed=2), "b": prompt(1, seed=3)},
                trees={"a": (prompt(len(TREE), seed=4), TREE)},
                taps=boundaries,
            ),
        ]
        found[switch] = steps, model.caches
    for (layers, states), (fused, fused_states) in zip(*(steps for steps, _ in found.values()), strict=True):
        for row in layers:
            assert layers[row].std() > 0.5
            torch.testing.assert_close(fused[row], layers[row], atol=1e-4, rtol=0)
        for state, fused_state in zip(states, fused_states, strict=True):  # hidden and taps
            torch.testing.assert_close(fused_state, state, atol=1e-4, rtol=1e-4)
    for cache, fused_cache in zip(*(caches for _, caches in found.values()), strict=True):
        torch.testing.assert_close(fused_cache, cache, atol=1e-4, rtol=1e-4)


def test_bfloat16_differs_by_its_rounding(tmp_path, native, prompt, monkeypatch):
    path = tiny_checkpoint(tmp_path, "qwen3")
    monkeypatch.setenv(SWITCH, "0")
    exact = native(path).feed({"a": prompt(40)})[0]["a"]
    errors = []
    for switch in "01":
        monkeypatch.setenv(SWITCH, switch)
        got = native(path, dtype=torch.bfloat16).feed({"a": prompt(40)})[0]["a"]
        errors.append(float((got - exact).norm() / exact.norm()))
    assert max(errors) < 0.05
    assert errors[1] < 1.5 * errors[0]


def test_taps_are_not_overwritten(tmp_path, native, prompt, monkeypatch):
    """Each boundary's stream is its own: a layer adds to it elsewhere."""
    monkeypatch.setenv(SWITCH, "1")
    model = native(tiny_checkpoint(tmp_path))
    embedded = model.decoder.embed_tokens(torch.tensor(prompt(9), device=model.device))
    _, (_, first, second, last) = model.feed({"a": prompt(9)}, taps=(0, 1, 2))
    assert torch.equal(first, embedded)
    assert not torch.equal(first, second) and not torch.equal(second, last)


@pytest.mark.parametrize("fused", "01")
def test_no_token_at_all(fused, tmp_path, native, monkeypatch):
    monkeypatch.setenv(SWITCH, fused)
    model = native(tiny_checkpoint(tmp_path))
    nothing = torch.empty(0, dtype=torch.int64, device=model.device)
    meta = AttentionMetadata(nothing, nothing, nothing, nothing, nothing.new_zeros(1, 1), block_size=4)
    with torch.inference_mode():
        hidden, taps = model.decoder(nothing, nothing, meta, model.caches, (0, 2))
        logits = model.decoder.compute_logits(hidden)
    assert [hidden.shape, *(tap.shape for tap in taps)] == [(0, 64)] * 3
    assert logits.shape == (0, 300) and logits.dtype is torch.float32


class Elsewhere:
    """Stores keys and values in its own way."""


class Reading(TorchBackend):
    """Attends in its own way."""


def test_backends_that_store_elsewhere_get_the_layers(monkeypatch):
    monkeypatch.setenv(SWITCH, "1")
    assert can_fuse(torch.bfloat16, CPU) and can_fuse(torch.bfloat16, CPU, Reading())
    assert not can_fuse(torch.bfloat16, CPU, Elsewhere())


def test_where_it_is_the_default(monkeypatch):
    monkeypatch.delenv(SWITCH, raising=False)
    assert not can_fuse(torch.float32, CPU)
    if torch.cuda.is_available():
        assert can_fuse(torch.float32, CUDA) and can_fuse(torch.bfloat16, CUDA)
        assert not can_fuse(torch.float16, CUDA)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3-moe", "mixtral"])
def test_rows_on_a_gpu_are_invariant(family, dtype, tmp_path, paged, prompt, monkeypatch):
    """To the bit: a text in one step, in pieces that cross the kernels' tiles, and beside others."""
    monkeypatch.delenv(SWITCH, raising=False)
    files = resolve_model(tiny_checkpoint(tmp_path, family, hidden_size=192, intermediate_size=320))
    decoder = load_model(files, dtype=dtype, device=CUDA, max_model_len=512)
    assert decoder.fused
    ids = prompt(300)
    whole = paged(decoder, block_size=16).feed({"a": ids})[0]["a"]
    for cuts in ([0, 1, 2, 18, 50, 114, 243, *range(244, 260), 300], [0, 260, 265, 300]):
        for others in (0, 1, 7, 40):
            model = paged(decoder, block_size=16, seed=others)
            parts = []
            for begin, end in itertools.pairwise(cuts):
                beside = {f"b{i}": prompt(1 + i % 3, seed=i) for i in range(others)}
                parts.append(model.feed({"a": ids[begin:end], **beside})[0]["a"])
            assert torch.equal(torch.cat(parts), whole), (cuts, others)
