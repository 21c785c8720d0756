"""The conformance kit on both methods: chain, fixed tree and grown tree."""

from __future__ import annotations

from pathlib import Path

from specdec_eagle.testing import write_head
from specdecode.testing.conformance import parametrize_with_checks

TREE = "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 0, 0)]"


def head(layout, name, keys, **options):
    """Keys of a method whose head is written for the kit's target, which has 2 layers."""

    def config(toy):
        path = write_head(Path(toy.path).parent / f"eagle-{name}", layout, toy.path, **options)
        return {"model": str(path), **keys}

    return config


AUX = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
FOUR = {"num_speculative_tokens": 4}
CASES = [
    ("eagle", head("eagle", "chain", FOUR)),
    ("eagle", head("eagle", "fixed", {"speculative_token_tree": TREE})),
    (
        "eagle3",
        head("eagle3", "grown3", {"num_speculative_tokens": 9, "tree_top_k": 3, "tree_depth": 4}, **AUX),
    ),
    ("eagle3", head("eagle3-speculators", "chain3", {}, draft_vocab=200, norm_output=True, layers=2, **AUX)),
    ("eagle3", head("eagle3", "law", {**FOUR, "rejection_sample_method": "standard"}, **AUX)),
]


@parametrize_with_checks(CASES)
def test_conformance(check):
    check()
