"""The conformance kit: chain, fixed tree, grown tree, and laws."""

from __future__ import annotations

from pathlib import Path

from specdec_mlp.testing import write_speculator
from specdecode.testing.conformance import parametrize_with_checks

TREE = "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 0, 0)]"


def speculator(name, keys, **options):
    """Keys of a method whose speculator is written for the kit's target."""

    def config(toy):
        path = write_speculator(Path(toy.path).parent / f"mlp-{name}", toy.path, **options)
        return {"model": str(path), **keys}

    return config


CASES = [
    ("mlp_speculator", speculator("chain", {}, tied=True, scale_input=True)),
    ("mlp_speculator", speculator("fixed", {"speculative_token_tree": TREE})),
    ("mlp_speculator", speculator("grown", {"num_speculative_tokens": 9, "tree_top_k": 3})),
    ("mlp_speculator", speculator("law", {"rejection_sample_method": "standard"})),
]


@parametrize_with_checks(CASES)
def test_conformance(check):
    check()
