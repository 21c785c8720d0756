"""Every layout, written by hand: it loads, and drafts what the formulas say, to 1e-5."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from specdec_mtp.testing import ALONE, TARGETS, write_modules, write_target
from specdecode import SamplingParams
from specdecode.contract import FINAL, Tap
from specdecode.models.fused import SWITCH
from specdecode.plugins import default_manager, prepare
from specdecode.testing.reference import DenseStep, StatelessDrafter, dense_forward
from specdecode.testing.tiny import loaded, tiny_checkpoint

TEXT = np.random.default_rng(3).integers(3, 300, 14).tolist()
DRAFTS = 5


# -- the reference: formulas over the stored names, dense, and nothing of the plugin -----------------
def rms(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(x, theta, interleaved=False):
    """``[n, heads, d]`` by its place: pairs of ``d`` half apart, or neighbours."""
    d = x.shape[-1]
    angles = torch.arange(len(x))[:, None] / theta ** (torch.arange(0, d, 2) / d)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    pair = a * cos - b * sin, b * cos + a * sin
    return torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)


def attend(q, k, v):
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    scores = scores.masked_fill(torch.ones(len(q), len(q)).triu(1).bool(), -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)


class Reference:
    """The modules of one checkpoint, from its files."""

    def __init__(self, path, target, model, raw=False):
        self.w, self.model, self.raw = load_file(path / "model.safetensors"), model, raw
        self.c = json.loads((target / "config.json").read_text())
        self.speculators = "speculators_model_type" in json.loads((path / "config.json").read_text())
        self.eps = self.c["rms_norm_eps"]
        self.nextn = any("eh_proj" in name for name in self.w)
        self.modules = 1 + max(
            int(n.split("layers.")[1].split(".")[0]) - self.c["num_hidden_layers"] * self.nextn
            for n in self.w
            if "eh_proj" in n or "input_proj" in n
        )

    def part(self, number):
        prefix = "" if self.speculators else "model."
        prefix += f"layers.{self.c['num_hidden_layers'] + number}." if self.nextn else f"mtp_layers.{number}."
        return {n.removeprefix(prefix): t for n, t in self.w.items() if n.startswith(prefix)}

    def linear(self, w, x, name):
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)

    def attention(self, w, x):
        heads, theta = self.c["num_attention_heads"], self.c.get("rope_theta") or 10000.0
        if "rope_parameters" in self.c:
            theta = self.c["rope_parameters"]["rope_theta"]
        w = {n.removeprefix("self_attn."): t for n, t in w.items()}
        if "kv_b_proj.weight" in w:  # multi-head latent attention
            nope, rope = self.c["qk_nope_head_dim"], self.c["qk_rope_head_dim"]
            low = rms(self.linear(w, x, "q_a_proj"), w["q_a_layernorm.weight"], 1e-6)
            q = self.linear(w, low, "q_b_proj").unflatten(1, (heads, nope + rope))
            latent, turned = self.linear(w, x, "kv_a_proj_with_mqa").split([self.c["kv_lora_rank"], rope], 1)
            kv = self.linear(w, rms(latent, w["kv_a_layernorm.weight"], 1e-6), "kv_b_proj").unflatten(
                1, (heads, -1)
            )
            turned = rotate(turned[:, None], theta, True).expand(-1, heads, -1)
            q = torch.cat((q[..., :nope], rotate(q[..., nope:], theta, True)), -1)
            out = attend(q, torch.cat((kv[..., :nope], turned), -1), kv[..., nope:])
        else:
            size = self.c.get("head_dim") or self.c["hidden_size"] // heads
            q, k, v = (self.linear(w, x, f"{n}_proj").unflatten(1, (-1, size)) for n in "qkv")
            if "q_norm.weight" in w:
                q, k = rms(q, w["q_norm.weight"], self.eps), rms(k, w["k_norm.weight"], self.eps)
            turned = int(size * self.c.get("partial_rotary_factor", 1.0))
            q, k = (torch.cat((rotate(x[..., :turned], theta), x[..., turned:]), -1) for x in (q, k))
            out = attend(q, k, v)
        return out @ w["o_proj.weight"].T

    def mlp(self, w, x, prefix="mlp."):
        gate = torch.nn.functional.silu(x @ w[f"{prefix}gate_proj.weight"].T)
        return (gate * (x @ w[f"{prefix}up_proj.weight"].T)) @ w[f"{prefix}down_proj.weight"].T

    def experts(self, w, x):
        scores = (x @ w["mlp.gate.weight"].T).sigmoid()
        choice = (scores + w["mlp.gate.e_score_correction_bias"]).unflatten(1, (self.c["n_group"], -1))
        best = choice.topk(2, -1).values.sum(-1).topk(self.c["topk_group"], -1).indices
        kept = torch.zeros(len(x), self.c["n_group"]).scatter(1, best, 1.0)[..., None].bool()
        chosen = (
            choice.masked_fill(~kept, -torch.inf).flatten(1).topk(self.c["num_experts_per_tok"], -1).indices
        )
        weights = scores.gather(1, chosen)
        weights = weights / weights.sum(-1, keepdim=True) * self.c["routed_scaling_factor"]
        out = self.mlp(w, x, "mlp.shared_experts.")
        for row in range(len(x)):
            for expert, weight in zip(chosen[row].tolist(), weights[row], strict=True):
                out[row] += weight * self.mlp(w, x[row], f"mlp.experts.{expert}.")
        return out

    def forward(self, number, ids, hidden):
        """Tokens ``[n]`` and the hidden states before them ``[n, H]``: those handed on, and logits."""
        w = self.part(number)
        names = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
        if not self.nextn:
            names = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
        e, h, proj, final = (w[f"{name}.weight"] for name in names)
        e, h = rms(self.model.embed_tokens(ids), e, self.eps), rms(hidden, h, self.eps)
        mimo = not self.nextn and not self.speculators
        x = torch.cat((h, e) if mimo else (e, h), -1) @ proj.T
        x = x + self.attention(w, rms(x, w["input_layernorm.weight"], self.eps))
        inner = rms(x, w["post_attention_layernorm.weight"], self.eps)
        x = x + (self.experts(w, inner) if "mlp.gate.weight" in w else self.mlp(w, inner))
        y = rms(x, final, self.eps)
        return (x if self.raw else y), self.model.compute_logits(y)

    def draft(self, text, hidden, count, used):
        """Logits ``[count, V]`` of a greedy chain behind ``text``; ``hidden`` ``[len(text) - 1, H]``.

        Module ``k`` reads token ``i + k + 1`` beside what module ``k - 1`` made at ``i``; the last one goes
        on with what it made itself.
        """
        text, drawn = torch.tensor(text), []
        for level in range(count):
            if level < used:
                inputs = text[level + 1 :], hidden
            else:
                inputs = torch.cat((inputs[0], text[-1:])), torch.cat((inputs[1], hidden[-1:]))
            hidden, logits = self.forward(min(level, used - 1), *inputs)
            drawn.append(logits[-1])
            text = torch.cat((text, logits[-1].argmax()[None]))
        return torch.stack(drawn)


def drafted(target, model, info, count=DRAFTS, path=None, **config):
    """The plugin's logits of a greedy chain, ``[count, V]``, and its drafts."""
    given = {"method": "mtp", "num_speculative_tokens": count, **config}
    drafter = StatelessDrafter(model, info, given if path is None else given | {"model": str(path)})
    proposer, seen = drafter._proposer, []
    logits = proposer._logits
    proposer._logits = lambda states: seen.append(logits(states)) or seen[-1]
    params = SamplingParams(temperature=0, max_tokens=20)
    ids, _ = drafter.drafts(
        DenseStep(history=TEXT, prompt_len=len(TEXT), params=params, budget=count, room=count)
    )
    return torch.cat(seen), list(ids)


def check(target, path=None, raw=False, count=DRAFTS):
    model, info = loaded(target)
    tap = Tap(info.num_layers) if raw else FINAL
    hidden = dense_forward(model, TEXT[:-1], [tap])[1][0]
    reference = Reference(path or target, target, model, raw)
    with torch.inference_mode():
        wanted = reference.draft(TEXT, hidden, count, min(count, reference.modules))
    config = {"mtp_hidden_states": "raw"} if raw else {}
    got, ids = drafted(target, model, info, count, path, **config)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
    assert ids == wanted.argmax(-1).tolist()
    assert drafted(target, model, info, count, path, **config)[1] == ids  # a second load drafts the same
    return wanted


@pytest.mark.parametrize("modules", [1, 3])
@pytest.mark.parametrize("layout", TARGETS)
def test_layers_of_the_target(layout, modules, tmp_path):
    check(write_target(tmp_path / "target", layout, modules=modules))


@pytest.mark.parametrize("layout", TARGETS)
def test_hidden_states_before_the_final_norm(layout, tmp_path):
    target = write_target(tmp_path / "target", layout, modules=2)
    assert (check(target, raw=True) - check(target)).abs().max() > 1e-3


@pytest.mark.parametrize("modules", [1, 3])
def test_fused_kernels_compute_the_same(modules, tmp_path, monkeypatch):
    """What a GPU runs, on the kernels' references."""
    monkeypatch.setenv(SWITCH, "1")
    check(write_target(tmp_path / "target", modules=modules))
    target = tiny_checkpoint(tmp_path / "plain", "qwen3", output_scale=0.2)
    check(target, write_modules(tmp_path / "layers", target, "speculators", modules=modules))


def test_fewer_drafts_than_modules(tmp_path):
    check(write_target(tmp_path / "target", modules=3), count=2)


@pytest.mark.parametrize("modules", [1, 2])
@pytest.mark.parametrize("layout", ALONE)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_layers_alone(family, layout, modules, tmp_path):
    target = tiny_checkpoint(tmp_path / "target", family, output_scale=0.2)
    path = write_modules(tmp_path / "layers", target, layout, modules=modules)
    info = loaded(target)[1]
    assert prepare(default_manager(), {"model": str(path)}, info).method == "mtp"
    check(target, path)


@pytest.mark.parametrize("layout", TARGETS)
def test_what_is_left_out_matters(layout, tmp_path):
    """The reference's text is long enough, and the weights large enough, that each part shows."""
    target = write_target(tmp_path / "target", layout)
    model, info = loaded(target)
    whole = drafted(target, model, info)[0]
    hidden = load_file(target / "model.safetensors")
    for part in ("hnorm.weight", "hidden_layernorm.weight", "o_proj.weight", "down_proj.weight"):
        changed = {
            name: tensor * 1.5
            for name, tensor in hidden.items()
            if name.endswith(part) and ("layers.2." in name or "mtp" in name)
        }
        if changed:
            other = write_target(tmp_path / part, layout, tensors=changed)
            assert (drafted(other, *loaded(other))[0] - whole).abs().max() > 1e-4, part


def test_the_number_of_drafts_may_come_from_the_checkpoint(tmp_path):
    target = write_target(tmp_path / "target", modules=2)
    info = loaded(target)[1]
    assert prepare(default_manager(), {"method": "mtp"}, info).needs.width == 2
    path = write_modules(tmp_path / "layers", target, "speculators")
    assert prepare(default_manager(), {"model": str(path)}, info).needs.width == 3
