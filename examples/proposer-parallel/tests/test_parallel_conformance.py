"""Every promise of the contract, one test each: with the target's noise, and with laws."""

from __future__ import annotations

from specdecode.testing.conformance import parametrize_with_checks

from specdec_parallel.testing import drafter


@parametrize_with_checks(
    [
        ("parallel", drafter("parallel")),
        (
            "parallel",
            drafter("parallel-laws", rejection_sample_method="standard", num_speculative_tokens=3),
        ),
    ]
)
def test_conformance(check):
    check()
