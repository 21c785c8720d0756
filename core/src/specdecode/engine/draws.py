"""What the sampler has to know of each token to draw."""

from __future__ import annotations

from collections.abc import Sequence

from ..sampling.batch import SampleRow
from .plan import StepPlan
from .request import Request


def sample_row(request: Request, position: int, path: tuple[int, ...] = ()) -> SampleRow:
    """The draw of token ``position`` of ``request``, after the drafts ``path``."""
    return SampleRow(
        params=request.params,
        seed=request.seed,
        index=request.index,
        position=position,
        num_output=position - len(request.prompt_ids),
        history=request.history,
        path=path,
        stop_ids=request.stop_ids,
    )


def verification_rows(plan: StepPlan) -> list[SampleRow]:
    """One for each logits row of the step: the last token's, then each draft's, row after row."""
    draws: list[SampleRow] = []
    for row in plan.rows:
        if not row.samples:
            continue
        request, committed = row.request, len(row.request.token_ids)
        draws.append(sample_row(request, committed))
        for path in row.drafts.paths():
            ids: Sequence[int] = [row.drafts.ids[node] for node in path]
            draws.append(sample_row(request, committed + len(path), tuple(ids)))
    return draws
