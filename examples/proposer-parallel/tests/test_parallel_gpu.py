"""On a GPU: one pass a step, captured in the target's graph."""

from __future__ import annotations

import pytest
import torch
from specdecode.testing.conformance import Case, Outcome, Subject, all_checks
from specdecode.testing.conformance.running import run_check

pytest.importorskip("specdec_parallel")  # the workspace's tests run without it

from specdec_parallel.testing import drafter

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

IDS = {
    "lossless.greedy",
    "lossless.seeded",
    "graphs.static-steps",
    "graphs.fixed-addresses",
    "graphs.copies-nothing",
    "graphs.never-waits",
    "graphs.replays",
    "cost.told",
}


@pytest.fixture(scope="module")
def subject():
    return Subject(Case(method="parallel", config=drafter("parallel"), device="cuda"))


@pytest.mark.parametrize("check", [c for c in all_checks() if c.id in IDS], ids=lambda check: check.id)
def test_conformance_on_the_device(check, subject, monkeypatch):
    monkeypatch.delenv("SPECDECODE_CHECK_WRITES", raising=False)  # no graph can have its writes read back
    result = run_check(check, subject, {})
    print(result.detail)
    assert result.outcome is Outcome.PASSED, result.detail
