"""On a GPU: what the conformance kit can see only there, of ngram and of the scripted device proposers."""

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
METHODS = {
    "ngram": ("ngram", {**FOUR, "prompt_lookup_min": 1, "prompt_lookup_max": 3}),
    "self-draft": ("scripted-self-draft", FOUR),
    "eagle": ("scripted-eagle", FOUR),
    "eagle3": ("scripted-eagle", {**FOUR, "three_taps": True}),
    "eagle-tree": ("scripted-eagle", {"num_speculative_tokens": len(TREE), "tree": TREE}),
    "eagle-grown-tree": ("scripted-eagle", {"num_speculative_tokens": 9, "fanout": 3, "depth": 4}),
    "medusa": ("scripted-medusa", {}),
}
CHECKS = {check.id: check for check in all_checks() if check.group in ("graphs", "lossless")}
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
