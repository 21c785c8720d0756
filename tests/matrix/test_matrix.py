"""Every field of SamplingParams x every proposer x every circumstance: what the reference decoder gives."""

from __future__ import annotations

import re
from pathlib import Path

import attrs

#: Methods that are no part of the matrix, and why.
METHODS_LEFT_OUT = {
    "scripted-sampler": "knows no target but a table checkpoint; the law tests hold its rules",
    "scripted-wrong": "breaks promises that no output shows; the conformance kit has to see it",
}


def test_every_cell(matrix, proposer, circumstance):
    wrong = matrix.compare(proposer, circumstance, matrix.cells(circumstance), known=matrix.cases)
    assert not wrong, f"{len(wrong)} differences:\n" + "\n".join(wrong[:8])


# -- that the matrix holds what it says -----------------------------------------------------------
def test_every_field_has_a_case(matrix):
    from specdecode import SamplingParams
    from specdecode.testing.cases import LEFT_OUT

    fields = {field.name for field in attrs.fields(SamplingParams) if field.init}
    assert fields - set(LEFT_OUT) == {name for case in matrix.fields for name in case.changes}


def test_every_case_has_an_effect(matrix):
    """But for the fields whose effect is that a result stays what it was."""
    from specdecode.testing.cases import WITHOUT_EFFECT
    from specdecode.testing.comparison import differences

    without = [
        case.name
        for case in matrix.fields
        if not WITHOUT_EFFECT.issuperset(case.changes)
        and not list(differences(matrix.answers.of(case), matrix.answers.without(case)))
    ]
    assert not without


def test_every_method_is_in_the_matrix(matrix):
    from specdecode.plugins import default_manager

    ours = {record.method for record in default_manager().methods() if record.plugin in ("ngram", "scripted")}
    assert ours == {entry.config["method"] for entry in matrix.entries() if entry.config} | set(
        METHODS_LEFT_OUT
    )


def test_the_size_is_the_documented_one(matrix):
    from specdecode.testing.matrix import CIRCUMSTANCES

    cells = sum(len(matrix.cells(circumstance)) for circumstance in CIRCUMSTANCES) * len(matrix.entries())
    page = (Path(__file__).parents[2] / "docs" / "testing.md").read_text(encoding="utf-8")
    assert f"{cells:,} cells" in re.sub(r"\s+", " ", page)
