"""On a GPU: what the conformance kit can see only there, of every method that works on the device."""

from __future__ import annotations

import functools

import pytest
import torch
from specdecode.testing import scripted
from specdecode.testing.conformance import Case, Outcome, Subject, all_checks
from specdecode.testing.conformance.running import run_check

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

scripted.install()

FOUR = {"num_speculative_tokens": 4}
TREE = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 0, 0]]


def head(layout, **keys):
    """Keys of an EAGLE head that is written for the kit's target of 2 layers."""

    def config(toy):
        from specdec_eagle.testing import write_head

        aux = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]} if layout == "eagle3" else {}
        path = write_head(toy.path.parent / f"head-{layout}", layout, toy.path, **aux)
        return {"model": str(path), **keys}

    return config


def medusa(layout, **keys):
    """Keys of Medusa heads that are written for the kit's target."""

    def config(toy):
        from specdec_medusa.testing import write_heads

        return {"model": str(write_heads(toy.path.parent / f"medusa-{layout}", layout, toy.path)), **keys}

    return config


def speculator(name, *, tied, **keys):
    """Keys of an MLP speculator that is written for the kit's target."""

    def config(toy):
        from specdec_mlp.testing import write_speculator

        path = write_speculator(toy.path.parent / f"mlp-{name}", toy.path, tied=tied, scale_input=tied)
        return {"model": str(path), **keys}

    return config


METHODS = {
    "ngram": ("ngram", {**FOUR, "prompt_lookup_min": 1, "prompt_lookup_max": 3}),
    "self-draft": ("scripted-self-draft", FOUR),
    "draft-model": ("draft_model", lambda toy: {**FOUR, "model": str(toy.path), "max_model_len": 64}),
    "eagle-head": ("eagle", head("eagle", **FOUR)),
    "eagle-head-tree": ("eagle", head("eagle", speculative_token_tree=TREE)),
    "eagle3-head": ("eagle3", head("eagle3", **FOUR)),
    "eagle3-head-grown-tree": (
        "eagle3",
        head("eagle3", num_speculative_tokens=9, tree_top_k=3, tree_depth=4),
    ),
    "medusa-heads": ("medusa", medusa("medusa-1")),
    "medusa-heads-tree": ("medusa", medusa("head-only", speculative_token_tree=TREE)),
    "mlp": ("mlp_speculator", speculator("chain", tied=True)),
    "mlp-tree": ("mlp_speculator", speculator("fixed", tied=False, speculative_token_tree=TREE)),
    "mlp-grown-tree": (
        "mlp_speculator",
        speculator("grown", tied=False, num_speculative_tokens=9, tree_top_k=3),
    ),
    "eagle": ("scripted-eagle", FOUR),
    "eagle3": ("scripted-eagle", {**FOUR, "three_taps": True}),
    "eagle-tree": ("scripted-eagle", {"num_speculative_tokens": len(TREE), "tree": TREE}),
    "eagle-grown-tree": ("scripted-eagle", {"num_speculative_tokens": 9, "fanout": 3, "depth": 4}),
    "medusa": ("scripted-medusa", {}),
}
#: ``lossless.law`` is of rules that are verified on the host.
CHECKS = {
    check.id: check
    for check in all_checks()
    if check.group in ("graphs", "lossless") and check.id != "lossless.law"
}
WAITS = ("scripted-wrong", {**FOUR, "fault": "copies-indices"})


@pytest.fixture(autouse=True)
def _captured(monkeypatch):
    """Core reads each write back while it checks them, which no graph can."""
    monkeypatch.delenv("SPECDECODE_CHECK_WRITES", raising=False)


@functools.cache
def subject(name):
    method, config = METHODS[name]
    return Subject(Case(method=method, config=config, device="cuda"))


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", METHODS)
def test_promises_of_methods_on_the_device(name, check):
    result = run_check(CHECKS[check], subject(name), {})
    assert result.outcome is Outcome.PASSED, result.detail


def test_a_copy_is_seen_by_torch_too():
    method, config = WAITS
    result = run_check(
        CHECKS["graphs.never-waits"], Subject(Case(method=method, config=config, device="cuda")), {}
    )
    assert result.outcome is Outcome.FAILED and "synchroniz" in result.detail
