"""Every public layout, written by hand: it loads, and drafts what the formulas say, to 1e-5."""

from __future__ import annotations

import json

import attrs
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from specdec_medusa.layouts import LAYOUTS
from specdec_medusa.testing import write_heads
from specdecode import LLM, SamplingParams
from specdecode.contract import FINAL, LM_HEAD, ConfigError, Probs, Shape, Tap
from specdecode.plugins import default_manager, prepare
from specdecode.testing.reference import DenseStep, StatelessDrafter, dense_forward

TEXT = np.random.default_rng(3).integers(3, 300, 14).tolist()
VOCAB = 300


# -- the reference: formulas over the stored names, and nothing of the plugin ----------------------------
def reference(path, hidden, model):
    """Logits ``[heads, V]`` of all heads behind the state ``[H]`` that gave the last token."""
    config = json.loads((path / "config.json").read_text())
    w = {}
    for file in path.iterdir():
        if file.suffix == ".safetensors":
            w |= load_file(file)
        elif file.suffix in (".pt", ".bin"):
            w |= torch.load(file, weights_only=True)
    if config.get("model_type") == "medusa":
        w = {name.replace("medusa_heads.", ""): tensor for name, tensor in w.items()}
        layer, out = "blocks.{}.layers.{}", "lm_heads.{}.weight"
    else:
        prefix = "medusa_head." if any(name.startswith("medusa_head.") for name in w) else ""
        layer, out = prefix + "{}.{}.linear", prefix + "{}.%d.weight"
    heads = 1 + max(i for i in range(9) if layer.format(i, 0) + ".weight" in w)
    layers = 1 + max(j for j in range(9) if layer.format(0, j) + ".weight" in w)
    logits = []
    for i in range(heads):
        z = hidden
        for j in range(layers):
            y = z @ w[layer.format(i, j) + ".weight"].T + w.get(layer.format(i, j) + ".bias", 0)
            z = z + y * torch.sigmoid(y)
        name = (out % layers if "%" in out else out).format(i)
        rows = w.get(name)
        if rows is None and config.get("original_lm_head"):
            rows = w.get("lm_head.weight", w.get("lm_heads.0.weight"))
        own = model.compute_logits(z[None])[0] if rows is None else rows @ z
        kept = w.get("token_map")
        if kept is not None:
            own = own[kept] if len(own) > len(kept) else own
            own = torch.full((VOCAB,), -torch.inf).index_copy(0, kept, own)
        logits.append(own[:VOCAB])
    return torch.stack(logits)


def drafted(path, model, info, **config):
    """The plugin's logits ``[heads, V]`` and its drafts behind :data:`TEXT`, and what it needs."""
    drafter = StatelessDrafter(model, info, {"method": "medusa", "model": str(path), **config})
    heads, seen = drafter._proposer._heads, []
    original = heads.logits

    def watched(states, first):
        logits = original(states, first).float()
        kept = torch.arange(logits.shape[1]) if heads.draft_ids is None else heads.draft_ids
        seen.append(torch.full((len(logits), VOCAB), -torch.inf).index_copy(1, kept, logits))
        return logits

    heads.logits = watched
    params = SamplingParams(temperature=0, max_tokens=40)
    ids, parents = drafter.drafts(
        DenseStep(history=TEXT, prompt_len=len(TEXT), params=params, budget=64, room=8)
    )
    return torch.cat(seen), list(ids), list(parents)


def last_state(model):
    return dense_forward(model, TEXT[:-1], [FINAL])[1][0][-1]


CASES = [
    ("medusa-1", {}),
    ("medusa-1", {"form": "pt"}),
    ("medusa-1", {"layers": 2}),
    ("medusa-1", {"heads": 5, "medusa_num_heads": 2}),  # the published 7B says 2 and has 5
    ("medusa-1", {"medusa_num_heads": None, "medusa_num_layers": None}),
    ("medusa-2", {}),
    ("medusa-2", {"layers": 2, "heads": 3}),
    ("head-only", {}),
    ("head-only", {"form": "pt", "layers": 2}),
    ("head-only", {"version": None}),
    ("vllm", {}),
    ("vllm", {"bias": False, "layers": 2}),
    ("vllm", {"output": "shared"}),
    ("vllm", {"output": "none"}),
    ("vllm", {"draft_vocab": 120}),
    ("vllm", {"draft_vocab": 120, "output": "shared"}),
    ("vllm", {"draft_vocab": 120, "whole_rows": True}),
    ("vllm", {"draft_vocab": 120, "output": "none"}),
    ("vllm", {"vocab_size": 32001}),  # the default of old files
]


@pytest.mark.parametrize(("layout", "options"), CASES)
def test_logits_are_the_formulas(layout, options, target, model, info, tmp_path):
    path = write_heads(tmp_path / "heads", layout, target, fit=False, **options)
    if layout == "medusa-2":
        info = attrs.evolve(info, path=str(path))
    heads = options.get("heads", 4)
    if layout == "medusa-2":  # which is a whole model, too
        prepared = prepare(default_manager(), {"method": "medusa"}, info)
    else:
        prepared = prepare(default_manager(), {"model": str(path)}, info)
    assert (prepared.method, prepared.needs.width, prepared.needs.shape) == ("medusa", heads, Shape.CHAIN)
    assert prepared.needs.taps == (FINAL,) and not prepared.needs.kv and prepared.needs.graphs
    none = options.get("output", {"head-only": "none"}.get(layout)) == "none"
    assert prepared.needs.modules == ({LM_HEAD} if none else set())
    wanted = reference(path, last_state(model), model)
    got, ids, _ = drafted(path, model, info)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
    assert ids == wanted.argmax(-1).tolist() and len(ids) == heads
    assert drafted(path, model, info)[1] == ids  # a second load drafts the same
    if "draft_vocab" in options:
        assert (wanted > -torch.inf).sum(-1).tolist() == [120] * heads


def test_every_layout_is_written():
    assert {layout for layout, _ in CASES} == set(LAYOUTS)


def test_heads_in_the_targets_own_shards_want_no_model(target, model, info, tmp_path):
    path = write_heads(tmp_path / "both", "medusa-2", target)
    own = attrs.evolve(info, path=str(path))
    assert prepare(default_manager(), {"method": "medusa"}, own).needs.width == 4
    named, unnamed = {"method": "medusa", "model": str(path)}, {"method": "medusa"}
    drafters = [StatelessDrafter(model, own, config) for config in (named, unnamed)]
    step = DenseStep(
        history=TEXT, prompt_len=len(TEXT), params=SamplingParams(temperature=0), budget=4, room=4
    )
    first, second = (list(drafter.drafts(step)[0]) for drafter in drafters)
    assert first == second and len(first) == 4


def test_one_output_layer_stored_as_the_first(target, model, info, tmp_path):
    """vLLM's ``original_lm_head`` with the layer under the name of head 0."""
    path = write_heads(tmp_path / "a", "vllm", target, output="shared", fit=False)
    rows = load_file(path / "model.safetensors")["lm_head.weight"]
    other = write_heads(
        tmp_path / "b", "vllm", target, output="shared", fit=False,
        drop=("lm_head.weight",), tensors={"medusa_heads.lm_heads.0.weight": rows},
    )  # fmt: skip
    torch.testing.assert_close(drafted(other, model, info)[0], drafted(path, model, info)[0])


def test_a_logit_scale_is_applied(target, model, info, tmp_path):
    plain = write_heads(tmp_path / "a", "vllm", target)
    scaled = write_heads(tmp_path / "b", "vllm", target, logit_scale=0.5)
    torch.testing.assert_close(drafted(scaled, model, info)[0], 0.5 * drafted(plain, model, info)[0])


@pytest.mark.parametrize("rows", [288, 320])
def test_a_vocabulary_padded_otherwise(rows, target, model, info, tmp_path):
    tensors = {f"{i}.1.weight": torch.randn(rows, 64) for i in range(4)}
    path = write_heads(tmp_path / "heads", "medusa-1", target, tensors=tensors, fit=False)
    logits, ids, _ = drafted(path, model, info)
    assert (logits > -torch.inf).sum(-1).tolist() == [min(rows, VOCAB)] * 4 and max(ids) < min(rows, VOCAB)


def test_it_reads_the_state_behind_the_final_norm(target, model, info, tmp_path):
    """Of the last token's predecessor, whose logits gave the last token; not before the norm."""
    path = write_heads(tmp_path / "heads", "medusa-1", target, fit=False)
    before = dense_forward(model, TEXT[:-1], [Tap(2)])[1][0][-1]
    behind = dense_forward(model, TEXT, [FINAL])[1][0][-1]
    got = drafted(path, model, info)[0]
    for wrong in (before, behind):
        assert (reference(path, wrong, model) - got).abs().max() > 1e-2


@pytest.mark.parametrize("version", [None, "2"])
def test_random_weights_for_a_config_alone(version, target, tmp_path):
    """``load_format="dummy"``, to time a method."""
    (tmp_path / "config.json").write_text(
        json.dumps({"medusa_num_heads": 3, "medusa_num_layers": 2, "version": version})
    )
    config = {"method": "medusa", "model": str(tmp_path)}
    options = {"dtype": "float32", "device": "cpu", "max_model_len": 64, "num_gpu_blocks_override": 32}
    with LLM(
        str(target), load_format="dummy", speculative_config=config, skip_tokenizer_init=True, **options
    ) as llm:
        (output,) = llm.generate([{"prompt_token_ids": TEXT}], use_tqdm=False)
    assert output.metrics.drafted >= 3
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="has no weights, and its config no medusa_num_heads"):
        LLM(str(target), load_format="dummy", speculative_config=config, **options)


# -- trees -------------------------------------------------------------------------------------------
TREE = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 2)]


@pytest.mark.parametrize("layout", ["medusa-1", "head-only"])
def test_nodes_are_the_ranks_of_their_levels_head(layout, target, model, info, tmp_path):
    path = write_heads(tmp_path / "heads", layout, target, fit=False)
    got, ids, parents = drafted(path, model, info, speculative_token_tree=str(TREE))
    best = reference(path, last_state(model), model).argsort(-1, descending=True)
    ordered = sorted(TREE, key=lambda node: (len(node), node))
    assert ids == [int(best[len(node) - 1, node[-1]]) for node in ordered]
    assert parents == [ordered.index(node[:-1]) if node[:-1] else -1 for node in ordered]
    assert len(got) == 3  # no more heads than levels


def test_the_checkpoint_proposes_a_tree(target, model, info, tmp_path):
    choices = [[0], [1], [0, 0], [0, 1], [2]]
    path = write_heads(tmp_path / "heads", "medusa-1", target, choices=choices)

    def needs(**config):
        return prepare(default_manager(), {"model": str(path), **config}, info).needs

    assert (needs().width, needs().depth, needs().shape) == (5, 2, Shape.TREE)
    assert (needs(num_speculative_tokens=2).width, needs(num_speculative_tokens=2).depth) == (2, 1)
    chain = needs(speculative_token_tree="chain", num_speculative_tokens=3)
    assert (chain.width, chain.shape) == (3, Shape.CHAIN)
    assert drafted(path, model, info)[2] == [-1, -1, -1, 0, 0]


def test_the_published_tree(target, info, tmp_path):
    def needs(heads, **config):
        path = write_heads(tmp_path / f"{heads}", "medusa-1", target, heads=heads, fit=False)
        config = {"model": str(path), "speculative_token_tree": "mc_sim_7b_63", **config}
        return prepare(default_manager(), config, info).needs

    assert (needs(5).width, needs(5).depth) == (63, 4)
    assert needs(2).depth == 2 and needs(2).width < 63  # what two heads can fill
    assert needs(5, num_speculative_tokens=10).width == 10


def test_laws_are_told_where_the_rule_weighs_them(target, info, tmp_path):
    path = write_heads(tmp_path / "heads", "medusa-1", target)

    def needs(**config):
        return prepare(default_manager(), {"model": str(path), **config}, info).needs

    assert needs(rejection_sample_method="standard").probs is Probs.FULL
    greedy = needs(rejection_sample_method="standard", draft_sample_method="greedy")
    assert greedy.probs is Probs.NONE and greedy.graphs
