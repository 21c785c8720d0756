"""The conformance kit on chain and tree, with either backend."""

from __future__ import annotations

from importlib.util import find_spec

from specdecode.testing.conformance import parametrize_with_checks

TREE = {"suffix_decoding_use_tree_spec": True, "suffix_decoding_max_spec_factor": 3.0}
CASES = [
    ("suffix", {"backend": "python"}),
    ("suffix", {"backend": "python", "num_speculative_tokens": 6, **TREE}),
]
if find_spec("arctic_inference"):
    CASES.append(("suffix", {"backend": "arctic", "num_speculative_tokens": 6, **TREE}))


@parametrize_with_checks(CASES)
def test_conformance(check):
    check()
