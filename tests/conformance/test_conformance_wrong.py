"""Testing the tester: a deliberately wrong proposer fails the checks about its fault, and no others."""

from __future__ import annotations

import pytest
from specdecode.testing import scripted
from specdecode.testing.conformance import Outcome, all_checks, check_proposer

scripted.install()

#: Fault of ``scripted-wrong`` -> the checks that must fail.
WRONG = {
    "waits": {"drafts.place-honoured"},
    "rebinds-buffers": {"drafts.buffers-written"},
    "returns-drafts": {"drafts.buffers-written"},
    "keeps-buffers": {"drafts.buffers-not-kept"},
    "writes-into-view": {"drafts.view-not-written"},
    "exceeds-budget": {"drafts.within-budget"},
    "bends-chain": {"drafts.chain"},
    "reads-undeclared": {"honesty.declares-what-it-reads"},
    "reaches-around": {"honesty.undeclared-not-used"},
    "declares-taps": set(),  # a warning
    "leaks-on-abort": {"lifecycle.frees-everything"},
    "leaks-unasked": {"failure.frees-unasked"},
    "refuses-resumption": {"lifecycle.any-order"},
    "forgets-preempted": {"lifecycle.any-order"},
    "misspells-a-hook": set(),  # a warning
    "closes-once": {"lifecycle.close-twice"},
    "tells-nan": {"lifecycle.metrics"},
    "peeks-at-neighbours": {"isolation.neighbours", "state.through-preemptions"},  # others run beside it
    "remembers": {"isolation.forgets-requests"},
    "remembers-namespaces": {"isolation.namespaces"},
    "spoils-target": {"lossless.greedy", "lossless.seeded"},
    "takes-offence": {"failure.recovers"},
    "takes-revenge": {"failure.costs-drafts-only"},
    "doubles-resumed": {"state.through-preemptions"},
    "stale-entries": {"state.as-stateless"},
    "loses-its-place": {"state.after-failures", "graphs.static-steps"},  # where on_commit comes late
    "counts-padding": {"graphs.static-steps"},
    "rebinds-state": {"graphs.fixed-addresses"},
    "copies-indices": {"graphs.copies-nothing"},
}

#: Fault of ``scripted-wrong`` that is a warning -> the check that gives it.
WARNED = {
    "declares-taps": "honesty.uses-what-it-declares",
    "misspells-a-hook": "lifecycle.known-hooks",
}

#: Fault of ``scripted-faulty`` -> the checks that must fail.
FAULTY = {
    "id-too-high": {"drafts.in-vocabulary"},
    "cyclic-parents": {"drafts.parents-ordered"},
    "past-room": {"drafts.within-room"},
    "nan-scores": {"drafts.scores"},
    "raises": {"lifecycle.any-order"},
    "raises-in-on-preempt": {"lifecycle.any-order"},
    "raises-in-on-target-updated": {"lossless.new-weights"},
    "raises-in-metrics": {"lifecycle.metrics"},
}

CASES = [
    *(("scripted-wrong", fault, failing) for fault, failing in WRONG.items()),
    *(("scripted-faulty", fault, failing) for fault, failing in FAULTY.items()),
]


@pytest.mark.parametrize(("method", "fault", "failing"), CASES, ids=[case[1] for case in CASES])
def test_a_wrong_proposer_fails_its_own_checks_alone(method, fault, failing):
    report = check_proposer(
        method, lambda toy: {"num_speculative_tokens": 4, "texts": toy.texts, "fault": fault}
    )
    assert report.failed == failing, str(report)
    assert report.ok is not bool(failing)
    if fault in WARNED:
        assert report.ids(Outcome.WARNED) == {WARNED[fault]}


def test_every_check_of_a_proposer_at_work_has_one_that_fails_it():
    """Two that want laws are tried in ``test_conformance_kit.py``; two want a GPU."""
    light = {"packaging", "config", "needs", "cost"}  # of costs none fails
    at_work = {check.id for check in all_checks() if check.group not in light}
    failed = set().union(*WRONG.values(), *FAULTY.values())
    elsewhere = {"drafts.probabilities", "lossless.law", *WARNED.values()}
    assert at_work - failed == elsewhere | {"graphs.never-waits", "graphs.replays"}
