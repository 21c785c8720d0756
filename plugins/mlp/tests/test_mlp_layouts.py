"""Both published layouts, written by hand: they load, and draft what the formulas say, to 1e-5."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from specdec_mlp.testing import write_speculator
from specdecode import LLM, SamplingParams
from specdecode.contract import FINAL, Probs, Shape, Tap, Tokens
from specdecode.plugins import default_manager, prepare
from specdecode.testing.reference import DenseStep, StatelessDrafter, dense_forward

TEXT = np.random.default_rng(3).integers(3, 300, 14).tolist()


# -- the reference: formulas over the stored names, and nothing of the plugin ----------------------------
def rn(x):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


class Reference:
    def __init__(self, path):
        self.config = json.loads((path / "config.json").read_text())
        file = path / "model.safetensors"
        w = load_file(file) if file.is_file() else torch.load(path / "pytorch_model.bin", weights_only=True)
        self.w = {name.removeprefix("speculator."): tensor for name, tensor in w.items()}
        n, inner = self.config["n_predict"], self.w["proj.0.weight"].shape[0]
        sw = 0.5 ** (0.5 / n)
        self.ratio = math.sqrt((1 - sw**2) * inner / 2) / sw

    def part(self, name, k):
        k = k if not self.config["tie_weights"] else (min(k, 1) if name.startswith("proj") else 0)
        return self.w[name.format(k)]

    def enter(self, h):
        return rn(h) / math.sqrt(2) if self.config["scale_input"] else h

    def step(self, k, s, token):
        s = self.part("proj.{}.weight", k) @ s + self.ratio * self.part("emb.{}.weight", k)[token]
        x = self.part("ln.{}.weight", k) * rn(s) + self.part("ln.{}.bias", k)
        s = 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))
        return s, self.part("head.{}.weight", k) @ s

    def draft(self, h, last, count):
        """Logits ``[count, V]`` of a greedy chain."""
        s, drawn = self.enter(h), []
        for k in range(count):
            s, logits = self.step(k, s, last)
            last = int(logits.argmax())
            drawn.append(logits)
        return torch.stack(drawn)


def drafter_of(path, model, info, **config):
    return StatelessDrafter(model, info, {"method": "mlp_speculator", "model": str(path), **config})


def drafted(path, model, info, **config):
    """The plugin's logits in the order in which they were made, its drafts and their parents."""
    drafter = drafter_of(path, model, info, **config)
    speculator, seen = drafter._proposer._speculator, []
    original = speculator.logits

    def watched(step, state):
        seen.append(original(step, state).float())
        return seen[-1]

    speculator.logits = watched
    params = SamplingParams(temperature=0, max_tokens=40)
    ids, parents = drafter.drafts(
        DenseStep(history=TEXT, prompt_len=len(TEXT), params=params, budget=64, room=8)
    )
    return torch.cat(seen), list(ids), list(parents)


def last_state(model):
    return dense_forward(model, TEXT[:-1], [FINAL])[1][0][-1]


CASES = [
    {},
    {"form": "bin"},
    {"scale_input": True},
    {"tied": True},
    {"tied": True, "scale_input": True},
    {"tied": True, "duplicates": True},
    {"tied": True, "form": "bin"},
    {"n_predict": 3},
    {"n_predict": 5, "tied": True, "scale_input": True},
    {"n_predict": 1},
    {"n_predict": 2, "tied": True},
    {"inner": 64, "inner_dim": 0},
    {"emb_dim": None, "hidden_size": None},
]


@pytest.mark.parametrize("options", CASES)
def test_logits_are_the_formulas(options, target, model, info, tmp_path):
    count = options.get("n_predict", 4)
    path = write_speculator(tmp_path / "s", target, fit=False, **options)
    prepared = prepare(default_manager(), {"model": str(path)}, info)
    needs = prepared.needs
    assert (prepared.method, needs.width, needs.shape) == ("mlp_speculator", count, Shape.CHAIN)
    assert (needs.taps, needs.tokens, needs.kv, needs.modules) == ((FINAL,), Tokens.NEW, (), frozenset())
    assert needs.graphs
    wanted = Reference(path).draft(last_state(model), TEXT[-1], count)
    got, ids, _ = drafted(path, model, info)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
    assert ids == wanted.argmax(-1).tolist()
    assert drafted(path, model, info)[1] == ids  # a second load drafts the same


@pytest.mark.parametrize("tied", [False, True])
def test_the_scalings_are_of_the_trained_count(tied, target, model, info, tmp_path):
    """Of ``n_predict``, though fewer are drafted."""
    path = write_speculator(tmp_path / "s", target, fit=False, tied=tied)
    got, ids, _ = drafted(path, model, info, num_speculative_tokens=2)
    wanted = Reference(path).draft(last_state(model), TEXT[-1], 4)[:2]
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
    assert len(ids) == 2


def test_tied_weights_are_told_where_the_config_does_not(target, model, info, tmp_path):
    path = write_speculator(tmp_path / "s", target, fit=False, tied=True, tie_weights=None)
    tied = write_speculator(tmp_path / "t", target, fit=False, tied=True)
    assert torch.equal(drafted(path, model, info)[0], drafted(tied, model, info)[0])


def test_it_reads_the_state_behind_the_final_norm(target, model, info, tmp_path):
    path = write_speculator(tmp_path / "s", target, fit=False)
    before = dense_forward(model, TEXT[:-1], [Tap(2)])[1][0][-1]
    behind = dense_forward(model, TEXT, [FINAL])[1][0][-1]
    got = drafted(path, model, info)[0][0]
    for wrong in (before, behind):
        assert (Reference(path).draft(wrong, TEXT[-1], 1)[0] - got).abs().max() > 1e-2


@pytest.mark.parametrize("rows", [288, 320])
def test_a_vocabulary_padded_otherwise(rows, target, model, info, tmp_path):
    path = write_speculator(tmp_path / "s", target, vocab=rows)
    logits, ids, _ = drafted(path, model, info)
    assert logits.shape == (4, min(rows, 300)) and max(ids) < min(rows, 300)


@pytest.mark.parametrize("tied", [False, True])
def test_random_weights_for_a_config_alone(tied, target, tmp_path):
    """``load_format="dummy"``, to time a method."""
    fields = {"model_type": "mlp_speculator", "n_predict": 3, "inner_dim": 0, "tie_weights": tied}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    options = {"dtype": "float32", "device": "cpu", "max_model_len": 64, "num_gpu_blocks_override": 32}
    with LLM(
        str(target),
        load_format="dummy",
        speculative_config={"model": str(tmp_path)},
        skip_tokenizer_init=True,
        **options,
    ) as llm:
        (output,) = llm.generate([{"prompt_token_ids": TEXT}], use_tqdm=False)
    assert output.metrics.drafted >= 3


# -- trees -------------------------------------------------------------------------------------------
def walk(path, h, fanout, depth):
    """Every node of the full tree of ``fanout`` children, depth first: path of ids -> log-probability."""
    reference, found = Reference(path), {}

    def below(s, token, ids, score):
        s, logits = reference.step(len(ids), s, token)
        best = logits.log_softmax(-1).topk(fanout)
        for value, index in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            found[(*ids, index)] = score + value
            if len(ids) + 1 < depth:
                below(s, index, (*ids, index), score + value)

    below(reference.enter(h), TEXT[-1], (), 0.0)
    return found


def paths_of(ids, parents):
    paths = []
    for token, parent in zip(ids, parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def test_a_fixed_tree_goes_on_from_each_nodes_own_state(target, model, info, tmp_path):
    tree = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 2), (1, 0, 2, 1)]
    path = write_speculator(tmp_path / "s", target, fit=False, scale_input=True)
    _, ids, parents = drafted(path, model, info, speculative_token_tree=str(tree))
    reference = Reference(path)

    def token_path(node):
        s, token, drawn = reference.enter(last_state(model)), TEXT[-1], []
        for k, rank in enumerate(node):
            s, logits = reference.step(k, s, token)
            token = int(logits.argsort(descending=True)[rank])
            drawn.append(token)
        return tuple(drawn)

    ordered = sorted(tree, key=lambda node: (len(node), node))
    assert paths_of(ids, parents) == [token_path(node) for node in ordered]


@pytest.mark.parametrize("nodes", [2, 4, 9])
def test_a_grown_tree_keeps_the_best_nodes(nodes, target, model, info, tmp_path):
    """Where every node of the first level is expanded: the best of all, in order."""
    path = write_speculator(tmp_path / "s", target, fit=False, tied=True, n_predict=2)
    found = walk(path, last_state(model), 3, 2)
    _, ids, parents = drafted(path, model, info, tree_top_k=3, num_speculative_tokens=nodes)
    best = sorted(found, key=lambda node: -found[node])[:nodes]
    assert paths_of(ids, parents) == best


def test_n_predict_bounds_the_levels(target, info, tmp_path):
    path = write_speculator(tmp_path / "s", target, fit=False, n_predict=3)

    def needs(**config):
        return prepare(default_manager(), {"model": str(path), **config}, info).needs

    assert (needs(tree_top_k=4, num_speculative_tokens=12).depth) == 3
    assert needs().depth == needs().width == 3
    assert needs(rejection_sample_method="standard").probs is Probs.FULL
    grown = needs(rejection_sample_method="standard", tree_top_k=4, num_speculative_tokens=12)
    assert grown.probs is Probs.NONE
