"""Every public layout, written by hand: it loads, and drafts what the formulas say, to 1e-5."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from specdec_eagle.testing import LAYOUTS, write_head
from specdecode import SamplingParams
from specdecode.contract import FINAL, ConfigError, Tap
from specdecode.models.fused import SWITCH
from specdecode.plugins import default_manager, prepare
from specdecode.testing.reference import DenseStep, StatelessDrafter, dense_forward

TEXT = np.random.default_rng(3).integers(3, 300, 14).tolist()
DRAFTS = 4


# -- the reference: formulas over the stored names, dense, and nothing of the plugin -----------------
def rms(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(x, positions, theta):
    half = x.shape[-1] // 2
    angles = positions[:, None] / theta ** (torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat(
        (x[..., :half] * cos - x[..., half:] * sin, x[..., half:] * cos + x[..., :half] * sin), -1
    )


def attention(w, x, heads, theta, slower):
    """``[n, ...]`` inputs of a layer to its attention's output, causal; positions from 0."""

    def project(name):
        y = x @ w[f"self_attn.{name}.weight"].T + w.get(f"self_attn.{name}.bias", 0)
        return y.unflatten(-1, (heads, -1))

    positions = torch.arange(len(x), dtype=torch.float32) / slower
    q, k, v = (
        rotate(project("q_proj"), positions, theta),
        rotate(project("k_proj"), positions, theta),
        project("v_proj"),
    )
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1) @ w["self_attn.o_proj.weight"].T


def mlp(w, x):
    gate = torch.nn.functional.silu(x @ w["mlp.gate_proj.weight"].T)
    return (gate * (x @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T


class Reference:
    """One head, from its files."""

    def __init__(self, path, model, renames=()):
        self.w = {}
        for name, tensor in load_file(path / "model.safetensors").items():
            for old, new in renames:
                name = new + name.removeprefix(old) if name.startswith(old) else name
            self.w[name] = tensor
        self.config = json.loads((path / "config.json").read_text())
        self.layer = self.config.get("transformer_layer_config") or self.config.get("model") or self.config
        self.eps, self.model = self.layer["rms_norm_eps"], model
        self.theta = self.layer.get("rope_theta", 10000.0)
        self.slower = (self.layer.get("rope_scaling") or {}).get("factor", 1.0)  # linear scaling
        self.eagle3 = self.w["first.self_attn.q_proj.weight"].shape[1] == 2 * self.layer["hidden_size"]

    def part(self, prefix):
        return {n.removeprefix(prefix): t for n, t in self.w.items() if n.startswith(prefix)}

    def norm(self, x, name):
        return rms(x, self.w[name], self.eps) if name in self.w else x

    def fuse(self, taps):
        if not self.eagle3 or "fc.weight" not in self.w:
            return taps[0]
        taps = [self.norm(tap, f"fc_norm.{i}.weight") for i, tap in enumerate(taps)]
        return self.norm(torch.cat(taps, -1), "input_norm.weight") @ self.w["fc.weight"].T + self.w.get(
            "fc.bias", 0
        )

    def forward(self, ids, g):
        """Tokens ``[n]`` and the features before them ``[n, H]``: features and logits of all."""
        w, heads = self.part("first."), self.layer["num_attention_heads"]
        e = self.w.get("embed_tokens.weight", self.model.embed_tokens.weight)[ids]
        if self.eagle3:
            v = self.norm(g, "first.hidden_norm.weight")
            r = v if self.config.get("norm_before_residual") else g
            u = self.norm(e, "first.input_layernorm.weight")
            a = r + attention(w, torch.cat((u, v), -1), heads, self.theta, self.slower)
        else:
            e = self.norm(e, "embedding_layernorm.weight")
            x = torch.cat((e, g), -1) @ self.w["fc.weight"].T + self.w.get("fc.bias", 0)
            a = x + attention(w, self.norm(x, "first.input_layernorm.weight"), heads, self.theta, self.slower)
        x = a + mlp(w, self.norm(a, "first.post_attention_layernorm.weight"))
        for layer in range(1, self.layer["num_hidden_layers"]):
            w = self.part(f"layers.{layer}.")
            x = x + attention(
                w, rms(x, w["input_layernorm.weight"], self.eps), heads, self.theta, self.slower
            )
            x = x + mlp(w, rms(x, w["post_attention_layernorm.weight"], self.eps))
        states = self.norm(x, "norm.weight" if self.eagle3 else "head_norm")
        own = "lm_head.weight" in self.w
        logits = states @ self.w["lm_head.weight"].T if own else self.model.compute_logits(states)
        if "d2t" in self.w:
            kept = self.w["d2t"] + torch.arange(len(self.w["d2t"]))
            logits = logits if own else logits[:, kept]
            logits = torch.full((len(x), 300), -torch.inf).index_copy(1, kept, logits)
        return (states if self.config.get("norm_output") else x), logits

    def draft(self, text, taps, count):
        """Logits ``[count, V]`` of a greedy chain behind ``text``; ``taps`` ``[len(text) - 1, Ht]`` each."""
        ids, features, drawn = torch.tensor(text[1:]), self.fuse(taps), []
        for _ in range(count):
            out, logits = self.forward(ids, features)
            drawn.append(logits[-1])
            ids = torch.cat((ids, logits[-1].argmax()[None]))
            features = torch.cat((features, out[-1:]))
        return torch.stack(drawn)


FIRST = [("midlayer.", "first."), ("layers.0.", "first."), ("transformer.", "first."), ("fusion_fc.", "fc.")]
FIRST += [("model.layers.0.", "first."), ("hidden_layernorm.", "first.input_layernorm.")]
FIRST += [("embed_layernorm.", "embedding_layernorm."), ("model.embed_tokens.", "embed_tokens.")]
FIRST += [("lm_head_layernorm.weight", "head_norm"), ("pre_lm_head_layernorm.weight", "head_norm")]


@pytest.fixture(params=["0", "1"], ids=["layers", "fused"], autouse=True)
def way(request, monkeypatch):
    """How a head computes: by its layers, or as on a GPU, there on the kernels' torch references."""
    monkeypatch.setenv(SWITCH, request.param)


def drafted(path, model, info, count=DRAFTS, **config):
    """The plugin's logits of a greedy chain, ``[count, V]``, and its drafts."""
    drafter = StatelessDrafter(model, info, {"model": str(path), "num_speculative_tokens": count, **config})
    head, seen = drafter._proposer._head, []
    assert head.fused == (os.environ[SWITCH] == "1")
    original = head.logits

    def watched(states):
        logits = original(states)
        kept = torch.arange(logits.shape[1]) if head.draft_ids is None else head.draft_ids
        seen.append(torch.full((1, 300), -torch.inf).index_copy(1, kept, logits))
        return logits

    head.logits = watched
    params = SamplingParams(temperature=0, max_tokens=20)
    ids, _ = drafter.drafts(
        DenseStep(history=TEXT, prompt_len=len(TEXT), params=params, budget=count, room=count)
    )
    return torch.cat(seen), ids


def check(path, model, info, boundaries, **config):
    taps = dense_forward(model, TEXT[:-1], [FINAL if b == "final" else Tap(b) for b in boundaries])[1]
    wanted = Reference(path, model, FIRST).draft(TEXT, taps, DRAFTS)
    got, ids = drafted(path, model, info, **config)
    near = 1e-5 if os.environ[SWITCH] == "0" else 1e-4  # where norms are made behind the products
    torch.testing.assert_close(got, wanted, atol=near, rtol=near)
    assert list(ids) == wanted.argmax(-1).tolist()
    assert drafted(path, model, info, **config)[1] == ids  # a second load drafts the same
    return wanted


DEFAULT = (2, 4, 5)
EAGLE = [
    ("eagle", {}),
    ("eagle", {"embed": True}),
    ("eagle", {"fc_bias": True, "bias": True}),
    ("eagle", {"bias": None, "layers": 2}),
    ("eagle", {"rope_theta": 500000.0}),
    ("eagle", {"embed": True, "lm_head": True}),
    ("eagle-norms", {}),
    ("eagle-norms", {"fc_bias": True}),
    ("eagle-vllm", {"lm_head": True, "embed": True}),
    ("eagle-speculators", {}),
    ("eagle-speculators", {"fc_bias": True, "fusion_bias": True}),
    ("eagle-speculators-norms", {}),
]
EAGLE3 = [
    ("eagle3", {}),
    ("eagle3", {"draft_vocab": 40}),
    ("eagle3", {"draft_vocab": 40, "lm_head": False}),
    ("eagle3", {"lm_head": False, "draft_vocab_size": None}),
    ("eagle3", {"embed": True}),
    ("eagle3", {"hidden_size": 48, "embed": True, "draft_vocab": 64}),
    ("eagle3", {"layers": 2}),
    ("eagle3", {"norm_before_residual": True}),
    ("eagle3", {"norm_output": True}),
    ("eagle3", {"input_norm": True}),
    ("eagle3", {"fc_norm": True, "norm_output": True}),
    ("eagle3", {"tie_word_embeddings": True}),
    ("eagle3", {"architectures": ["LlamaForCausalLMEagle3"], "fc_bias": True}),
    ("eagle3-speculators", {}),
    ("eagle3-speculators", {"draft_vocab": 40, "embed": True}),
    ("eagle3-speculators", {"draft_vocab": 40, "norm_before_residual": True}),
]


@pytest.mark.parametrize(("layout", "options"), EAGLE)
def test_eagle(layout, options, target, model, info, tmp_path):
    path = write_head(tmp_path / "head", layout, target, **options)
    assert (
        prepare(default_manager(), {"model": str(path), "num_speculative_tokens": 2}, info).method == "eagle"
    )
    check(path, model, info, ["final"])


@pytest.mark.parametrize(("layout", "options"), EAGLE3)
def test_eagle3(layout, options, target, model, info, tmp_path):
    path = write_head(tmp_path / "head", layout, target, **options)
    assert (
        prepare(default_manager(), {"model": str(path), "num_speculative_tokens": 2}, info).method == "eagle3"
    )
    logits = check(path, model, info, DEFAULT)
    if options.get("draft_vocab"):
        assert (logits > -torch.inf).sum(-1).tolist() == [options["draft_vocab"]] * DRAFTS


@pytest.mark.parametrize(
    ("ids", "convention", "boundaries"),
    [
        ([1, 3, 4], "auto", (2, 4, 5)),
        ([2, 4, 5], "auto", (2, 4, 5)),
        ([1, 3, 4], "inputs", (1, 3, 4)),
        ([2, 4, 7], "outputs", (3, 5, 8)),
        ([3, 6], "auto", (3, 6)),
    ],
)
@pytest.mark.parametrize("place", ["top", "eagle_config", "given"])
def test_both_conventions_of_layer_ids(ids, convention, boundaries, place, target, model, info, tmp_path):
    key = "eagle_aux_hidden_state_layer_ids"
    fields = {"top": {key: ids}, "eagle_config": {"eagle_config": {key: ids}}, "given": {key: [1, 2, 3]}}[
        place
    ]
    path = write_head(tmp_path / "head", "eagle3", target, taps=len(ids), **fields)
    given = {"aux_layer_ids": ids} if place == "given" else {}
    check(path, model, info, boundaries, aux_layer_convention=convention, method="eagle3", **given)


@pytest.mark.parametrize(
    "tree", [{"speculative_token_tree": [[0] * n for n in range(1, 5)]}, {"tree_top_k": 1}]
)
@pytest.mark.parametrize("layout", ["eagle", "eagle3"])
def test_a_tree_of_one_branch_is_a_chain(layout, tree, target, model, info, tmp_path):
    """Its scratch slots and rope positions too: the logits are the reference's."""
    path = write_head(tmp_path / "head", layout, target)
    check(path, model, info, ["final"] if layout == "eagle" else DEFAULT, **tree)


def test_a_head_on_the_last_hidden_state_has_no_fc(target, model, info, tmp_path):
    path = write_head(
        tmp_path / "head", "eagle3", target, fc=False, eagle_config={"use_aux_hidden_state": False}
    )
    check(path, model, info, ["final"])


def test_rope_can_be_overridden(target, model, info, tmp_path):
    wrong = write_head(tmp_path / "wrong", "eagle3", target, rope_theta=1e6)
    right = write_head(tmp_path / "right", "eagle3", target)
    fixed = drafted(wrong, model, info, method="eagle3", rope_parameters={"rope_theta": 10000.0})[0]
    torch.testing.assert_close(fixed, drafted(right, model, info)[0])
    assert (drafted(wrong, model, info)[0] - fixed).abs().max() > 1e-4


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
)
def test_h25_rope_scaling_is_the_heads_own(scaling, target, model, info, tmp_path):
    plain = write_head(tmp_path / "plain", "eagle", target)
    old = write_head(tmp_path / "old", "eagle", target, rope_scaling=scaling, rope_theta=10000.0)
    new = write_head(tmp_path / "new", "eagle", target, rope_parameters={**scaling, "rope_theta": 10000.0})
    scaled = drafted(old, model, info)[0]
    torch.testing.assert_close(scaled, drafted(new, model, info)[0])
    assert (scaled - drafted(plain, model, info)[0]).abs().max() > 1e-5
    if "low_freq_factor" not in scaling:
        check(old, model, info, ["final"])


def test_a_copy_of_the_targets_embedding_is_shared(target, model, info, tmp_path):
    def table(path):
        drafter = StatelessDrafter(model, info, {"model": str(path), "num_speculative_tokens": 2})
        return drafter._proposer._head.embed_tokens

    assert table(write_head(tmp_path / "copy", "eagle", target, embed=True)) is None
    other = torch.randn(300, 64)
    path = write_head(tmp_path / "own", "eagle", target, tensors={"embed_tokens.weight": other})
    assert torch.equal(table(path).weight, other)


@pytest.mark.parametrize("rows", [288, 320])
def test_h23_a_vocabulary_padded_otherwise(rows, target, model, info, tmp_path):
    tensors = {"lm_head.weight": torch.randn(rows, 64), "embed_tokens.weight": torch.randn(rows, 64)}
    path = write_head(
        tmp_path / "head", "eagle3", target, tensors=tensors, vocab_size=rows, draft_vocab_size=rows
    )
    logits, ids = drafted(path, model, info)
    assert logits.shape == (DRAFTS, 300) and max(ids) < 300
    assert (logits > -torch.inf).sum(-1).tolist() == [min(rows, 300)] * DRAFTS


def test_an_old_conversion_for_vllm_maps_its_tokens_by_id(target, model, info, tmp_path):
    whole = drafted(write_head(tmp_path / "whole", "eagle-vllm", target, lm_head=True), model, info, count=1)[
        0
    ]
    kept = torch.arange(5, 300, 7)
    head = load_file(target / "model.safetensors")["lm_head.weight"][kept]
    path = write_head(
        tmp_path / "head",
        "eagle-vllm",
        target,
        tensors={"token_map": kept, "lm_head.weight": head},
        truncated_vocab_size=len(kept),
    )
    logits = drafted(path, model, info, count=1)[0]
    torch.testing.assert_close(logits[:, kept], whole[:, kept], atol=1e-5, rtol=1e-5)
    assert int((logits > -torch.inf).sum()) == len(kept)


def test_where_the_norm_stands_is_what_its_readers_take_for_granted(target, model, info, tmp_path):
    """A speculators config that does not say it: before the residual."""
    said = write_head(tmp_path / "said", "eagle3-speculators", target, norm_before_residual=True)
    silent = write_head(tmp_path / "silent", "eagle3-speculators", target, norm_before_residual=None)
    assert torch.equal(drafted(said, model, info)[0], drafted(silent, model, info)[0])


def test_the_number_of_drafts_may_come_from_the_checkpoint(target, info, tmp_path):
    path = write_head(tmp_path / "s", "eagle3-speculators", target)
    assert prepare(default_manager(), {"model": str(path)}, info).needs.width == 3
    silent = write_head(tmp_path / "e", "eagle3", target)
    with pytest.raises(ConfigError, match="num_speculative_tokens is missing"):
        prepare(default_manager(), {"model": str(silent)}, info)


def test_all_layouts_were_tried():
    assert {layout for layout, _ in EAGLE + EAGLE3} == set(LAYOUTS)
