"""Rows that are verified by the drafter's probabilities: their laws, their chances, their tokens."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from ..sampling.batch import SampleRow, SamplingBatch
from ..sampling.laws import chances, draw_from, law
from ..sampling.streams import Stream
from ..verify.base import Law, Rule, Verdict, Weigh, WeighedDrafts
from .draws import LazyTargets
from .plan import RowPlan


@attrs.frozen(eq=False)
class WeighedRow:
    """One row with drafts."""

    plan: RowPlan
    draws: Sequence[SampleRow]  #: behind the last token and behind each draft
    logits: torch.Tensor  #: ``[len(draws), V]``
    lazy: LazyTargets | None  #: of a request with logits processors


def weigh(rule: Rule, rows: Sequence[WeighedRow]) -> list[Verdict]:
    """Verify ``rows`` by ``rule``; a verdict's last token is ``UNDRAWABLE`` if there was none to draw."""
    assert rule.weigh is not None and rule.weigh_in_order is not None
    verdicts: dict[int, Verdict] = {}
    for in_order, function in ((False, rule.weigh), (True, rule.weigh_in_order)):
        places = [place for place, row in enumerate(rows) if (row.lazy is not None) == in_order]
        if places:
            verdicts |= zip(places, _decide(rule, function, [rows[place] for place in places]), strict=True)
    return [verdicts[place] for place in range(len(rows))]


def _decide(rule: Rule, function: Weigh, rows: Sequence[WeighedRow]) -> list[Verdict]:
    drafts = [row.plan.drafts for row in rows]
    device = rows[0].logits.device
    weighed = function(
        WeighedDrafts(
            ids=[own.ids for own in drafts],
            parents=[own.parents for own in drafts],
            probs=[None if own.probs is None else own.probs.to(device) for own in drafts],
            chances=_chances(rule, rows),
            law=_lazy_laws(rows) if rows[0].lazy is not None else _laws(rows),
        )
    )
    nodes = [accepted[-1] if accepted else -1 for accepted in weighed.accepted]
    last = [row.draws[node + 1] for row, node in zip(rows, nodes, strict=True)]
    tokens = draw_from(weighed.left, last).tolist()
    return [
        Verdict(accepted, (*(own.ids[node] for node in accepted), token))
        for own, accepted, token in zip(drafts, weighed.accepted, tokens, strict=True)
    ]


def _laws(rows: Sequence[WeighedRow]) -> Law:
    """The laws behind all nodes, computed at once."""
    first: list[int] = []
    flat: list[SampleRow] = []
    for row in rows:
        first.append(len(flat))
        flat += row.draws
    logits = torch.cat([row.logits for row in rows])
    probs = law(logits, SamplingBatch.build(flat, logits.shape[-1], logits.device))

    def read(places: Sequence[int], nodes: Sequence[int]) -> torch.Tensor:
        return probs[[first[place] + node + 1 for place, node in zip(places, nodes, strict=True)]]

    return read


def _lazy_laws(rows: Sequence[WeighedRow]) -> Law:
    def read(places: Sequence[int], nodes: Sequence[int]) -> torch.Tensor:
        laws = []
        for place, node in zip(places, nodes, strict=True):
            lazy = rows[place].lazy
            assert lazy is not None
            laws.append(lazy.law(node + 1))
        return torch.stack(laws)

    return read


def _chances(rule: Rule, rows: Sequence[WeighedRow]) -> torch.Tensor:
    """``[B, W]`` float32: a uniform number for each node, of the stream of acceptances."""
    drawn: list[SampleRow] = []
    ids: list[int] = []
    where: list[tuple[int, int]] = []
    for place, row in enumerate(rows):
        drafts, stream = row.plan.drafts, rule.stream(Stream.ACCEPT, len(row.plan.request.token_ids))
        for node, (token, parent) in enumerate(zip(drafts.ids, drafts.parents, strict=True)):
            drawn.append(attrs.evolve(row.draws[parent + 1], stream=stream))
            ids.append(token)
            where.append((place, node))
    device = rows[0].logits.device
    table = torch.ones(len(rows), max(len(row.plan.drafts) for row in rows), device=device)
    places, nodes = torch.tensor(where, device=device).T
    table[places, nodes] = chances(drawn, ids, device)
    return table
