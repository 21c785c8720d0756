"""The conformance kit: chain, tree, laws, and the target's own output layer."""

from __future__ import annotations

from pathlib import Path

from specdec_medusa.testing import write_heads
from specdecode.testing.conformance import parametrize_with_checks

TREE = "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 0, 0)]"


def heads(layout, name, keys, **options):
    """Keys of a method whose heads are written for the kit's target."""

    def config(toy):
        path = write_heads(Path(toy.path).parent / f"medusa-{name}", layout, toy.path, **options)
        return {"model": str(path), **keys}

    return config


CASES = [
    ("medusa", heads("head-only", "chain", {})),
    ("medusa", heads("medusa-1", "tree", {"speculative_token_tree": TREE})),
    ("medusa", heads("vllm", "law", {"rejection_sample_method": "standard"}, draft_vocab=200)),
]


@parametrize_with_checks(CASES)
def test_conformance(check):
    check()
