"""What the engine is held to on one H100, and how a run compares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tables import Column

COLUMNS = (
    Column("goal", "goal"),
    Column("batch", "batch"),
    Column("bound", "bound"),
    Column("value", "measured", ".3f"),
    Column("met", "met"),
)
Rows = Sequence[Mapping[str, Any]]

PLAIN_MS = {1: 5.5, 8: 5.9, 32: 6.8}
SIX_TOKENS_MS = {1: 5.6, 8: 6.4, 32: 8.0}
NGRAM_EFFICIENCY = {1: 0.95, 8: 0.90, 32: 0.80}
DECIDING = 0.03
IDLE = 0.03
OVER_VLLM = {"plain": 1.12, "ngram": 1.4, "eagle3": 1.25, "draft_model": 1.6}
#: An EAGLE-3 chain of 3 for the 8B shape, 32k draft tokens, at synthetic acceptance 3.0.
EAGLE3_MS = {1: 1.0}
EAGLE3_EFFICIENCY = {1: 0.82, 8: 0.82, 32: 0.82}


def compare(sections: Mapping[str, Rows]) -> list[dict[str, Any]]:
    """A row for each goal that was measured."""
    plain, ngram, steps = (sections.get(name, ()) for name in ("plain", "ngram", "steps"))
    found = []

    def check(goal: str, row: Mapping[str, Any], key: str, bound: float, *, most: bool = True) -> None:
        value = row.get(key)
        if value is not None:
            met = value <= bound if most else value >= bound
            sign = "<=" if most else ">="
            found.append(
                {
                    "goal": goal,
                    "batch": row["batch"],
                    "bound": f"{sign} {bound:g}",
                    "value": value,
                    "met": "yes" if met else "NO",
                }
            )

    for row in plain:
        if row["batch"] in PLAIN_MS:
            check("plain, ms a token", row, "ms_per_token", PLAIN_MS[row["batch"]])
    for row in steps:
        if row["tokens"] == 6 and row["batch"] in SIX_TOKENS_MS:
            check("step of 6 tokens a row, ms", row, "step_ms", SIX_TOKENS_MS[row["batch"]])
            check("its deciding and sampling, share", row, "deciding", DECIDING)
    for row in ngram:
        if row["batch"] in NGRAM_EFFICIENCY:
            bound = NGRAM_EFFICIENCY[row["batch"]]
            check(f"{row['method']}, efficiency", row, "efficiency", bound, most=False)
    for row in sections.get("heads", ()):
        if row["method"] == "eagle3 k=3":
            if row["batch"] in EAGLE3_MS:
                check("eagle3 k=3, drafting, ms a step", row, "draft_ms", EAGLE3_MS[row["batch"]])
            if row["batch"] in EAGLE3_EFFICIENCY:
                bound = EAGLE3_EFFICIENCY[row["batch"]]
                check("eagle3 k=3, efficiency", row, "efficiency", bound, most=False)
    for row in (*plain, *ngram, *sections.get("synthetic", ())):
        if row["batch"] == 1:
            check(f"{row['method']}, idle", row, "idle", IDLE)
    for row in sections.get("vllm", ()):
        method = str(row["run"]).split()[0]
        if method in OVER_VLLM:
            check(f"{method}, tokens/s to vLLM", row, "ratio", OVER_VLLM[method], most=False)
    return found
