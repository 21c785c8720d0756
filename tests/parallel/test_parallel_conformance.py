"""The conformance kit on two ranks: a host method that rank 0 runs alone, and a head on all of them."""

from __future__ import annotations

from specdecode.testing import scripted
from specdecode.testing.conformance import Case, parametrize_with_checks

scripted.install()

FOUR = {"num_speculative_tokens": 4}
CASES = [
    Case(method="ngram", config={**FOUR, "prompt_lookup_min": 1, "prompt_lookup_max": 3}, ranks=2),
    Case(method="scripted-eagle", config=FOUR, ranks=2),
]


@parametrize_with_checks(CASES)
def test_conformance_on_two_ranks(check):
    check()
