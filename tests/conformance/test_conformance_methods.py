"""Every check of the conformance kit on every method there is: ngram and the scripted proposers."""

from __future__ import annotations

from specdecode.testing import scripted
from specdecode.testing.conformance import Case, parametrize_with_checks
from specdecode.testing.tiny import tiny_checkpoint

scripted.install()

FOUR = {"num_speculative_tokens": 4}
NGRAM = {**FOUR, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
TREE = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 0, 0]]
EAGLE = {"method": "scripted-eagle", **FOUR}
WRITES_ALL_DOWN = "a recording keeps what it has recorded"


def knowing(**config):
    """Keys of a proposer that is told the texts."""
    return lambda toy: {"texts": toy.texts, **config}


def small_draft(toy):
    path = tiny_checkpoint(
        toy.path.parent / "draft", output_scale=0.5, max_position_embeddings=256, num_hidden_layers=1
    )
    return {**FOUR, "model": str(path)}


def cascade(toy):
    half = toy.texts[: len(toy.texts) // 2]
    return {"children": [{"method": "scripted-oracle", **FOUR, "texts": half}, EAGLE]}


CASES: list = [
    ("ngram", NGRAM),
    ("scripted-oracle", knowing(**FOUR, wrong_at=[3])),
    ("scripted-liar", knowing(**FOUR)),
    ("scripted-ragged", knowing(**FOUR)),
    ("scripted-oracle-tree", knowing(num_speculative_tokens=7)),
    ("scripted-self-draft", FOUR),
    ("scripted-self-draft", {**FOUR, "rejection_sample_method": "standard"}),  # tells probabilities
    ("scripted-small-draft", small_draft),
    ("scripted-eagle", FOUR),
    ("scripted-eagle", {"num_speculative_tokens": len(TREE), "tree": TREE}),
    ("scripted-eagle", {"num_speculative_tokens": 9, "fanout": 3, "depth": 4}),
    ("scripted-medusa", {}),
    ("scripted-cascade", cascade),
    (
        "scripted-cascade",
        {"children": [{**EAGLE, "three_taps": True}, {"method": "scripted-self-draft", **FOUR, "layers": 1}]},
    ),
    Case(
        method="scripted-flaky",
        config={"inner": {"method": "ngram", **NGRAM}, "every": 4},
        expected_failures={"lifecycle.any-order": "it raises on purpose"},
    ),
    Case(
        method="scripted-recorder",
        config={"inner": {"method": "ngram", **NGRAM}, "recording": "conformance"},
        expected_failures={
            "lifecycle.frees-everything": WRITES_ALL_DOWN,
            "failure.frees-unasked": WRITES_ALL_DOWN,
        },
    ),
]


@parametrize_with_checks(CASES)
def test_conformance(check):
    check()
