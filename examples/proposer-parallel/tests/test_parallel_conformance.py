"""Every promise of the contract, one test each: with the target's noise, and with laws."""

from __future__ import annotations

from pathlib import Path

from drafters import shape_for, write_drafter
from specdecode.testing.conformance import parametrize_with_checks


def drafter(name, **keys):
    """Keys of the method, with a drafter that is written for the kit's target."""

    def config(toy):
        return {"model": str(write_drafter(Path(toy.path).parent / name, shape_for(toy.info))), **keys}

    return config


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
