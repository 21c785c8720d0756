"""The law of a rule of verification, worked out exactly: every draft, and every way its chances can fall.

Laws of target and drafter are tables ``[levels, V, V]`` float32: row ``[n, t]`` is the law behind ``n``
tokens of which ``t`` is the last (``t = 0`` for none).
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from ..verify import Weigh, WeighedDrafts

# Halvings of the interval that a threshold lies in: as fine as a float32 between 0 and 1.
_HALVINGS = 24
_NEGLIGIBLE = 1e-9


@attrs.frozen(eq=False)
class Drafted:
    """One outcome of drafting, and its probability."""

    weight: float
    ids: tuple[int, ...]
    probs: torch.Tensor | None  #: ``[n, V]``: what the drafter tells


@attrs.frozen
class Outcome:
    """One outcome of a step, and its probability: accepted tokens, and the law of the one behind them."""

    weight: float
    ids: tuple[int, ...]
    left: tuple[float, ...]


def law_behind(table: torch.Tensor, path: Sequence[int]) -> torch.Tensor:
    """``[V]``: the law of the token behind ``path``."""
    return table[len(path), path[-1] if path else 0]


def random_tables(
    seed: int, levels: int, size: int, spread: float = 1.5
) -> tuple[torch.Tensor, torch.Tensor]:
    """A table for a target and one for a drafter."""
    generator = torch.Generator().manual_seed(seed)
    target, drafter = (torch.randn(2, levels, size, size, generator=generator) * spread).softmax(-1)
    return target, drafter


# -- drafting --------------------------------------------------------------------------------------
def chains(table: torch.Tensor, length: int) -> list[Drafted]:
    """Every chain that a drafter with this table may give."""
    return trees(table, range(-1, length - 1))


def trees(table: torch.Tensor, parents: Sequence[int], *, replacement: bool = False) -> list[Drafted]:
    """Every tree of that shape: the children of a node are drawn in turn, with replacement or without."""
    cases: list[tuple[float, tuple[int, ...], tuple[torch.Tensor, ...]]] = [(1.0, (), ())]
    for node, parent in enumerate(parents):
        grown = []
        for weight, ids, laws in cases:
            law = law_behind(table, _path(ids, parents, parent)).clone()
            if not replacement:
                law[[ids[elder] for elder in range(node) if parents[elder] == parent]] = 0
                law /= law.sum()
            grown += [
                (weight * share, (*ids, token), (*laws, law))
                for token, share in enumerate(law.double().tolist())
                if share
            ]
        cases = grown
    return [Drafted(weight, ids, torch.stack(laws)) for weight, ids, laws in cases]


def _path(ids: Sequence[int], parents: Sequence[int], node: int) -> tuple[int, ...]:
    return () if node < 0 else (*_path(ids, parents, parents[node]), ids[node])


# -- verifying -------------------------------------------------------------------------------------
def rows_of(
    table: torch.Tensor, parents: Sequence[int], cases: Sequence[Drafted], chances: torch.Tensor
) -> WeighedDrafts:
    """``cases`` as the rows of a step of a target with this table; ``chances`` ``[B, W]`` float32."""

    def law(rows: Sequence[int], nodes: Sequence[int]) -> torch.Tensor:
        paths = [_path(cases[row].ids, parents, node) for row, node in zip(rows, nodes, strict=True)]
        return torch.stack([law_behind(table, path) for path in paths])

    return WeighedDrafts(
        ids=[case.ids for case in cases],
        parents=[tuple(parents)] * len(cases),
        probs=[case.probs for case in cases],
        chances=chances,
        law=law,
    )


def outcomes(
    rule: Weigh,
    table: torch.Tensor,
    parents: Sequence[int],
    drafted: Sequence[Drafted],
    *,
    backwards: bool = False,
) -> list[Outcome]:
    """Every outcome of a step, integrated over the chances.

    A rule accepts a node if its chance lies below a threshold that the decisions about earlier nodes
    settle (about later ones, if ``backwards``). So node after node its threshold is found by halving,
    and both sides of it are followed.
    """
    order = range(len(parents))
    states = [(case, torch.full((len(parents),), 1 - 2.0**-24)) for case in drafted]
    for node in reversed(order) if backwards else order:
        cases, chances = [case for case, _ in states], torch.stack([own for _, own in states])
        low, high = torch.zeros(len(states)), torch.ones(len(states))
        for _ in range(_HALVINGS):
            middle = chances[:, node] = (low + high) / 2
            accepted = rule(rows_of(table, parents, cases, chances)).accepted
            taken = torch.tensor([node in nodes for nodes in accepted])
            low, high = torch.where(taken, middle, low), torch.where(taken, high, middle)
        states = [
            (attrs.evolve(case, weight=case.weight * share), _with(own, node, chance))
            for (case, own), threshold in zip(states, low.tolist(), strict=True)
            for share, chance in ((threshold, threshold / 2), (1 - threshold, (1 + threshold) / 2))
            if case.weight * share > _NEGLIGIBLE
        ]
    cases = [case for case, _ in states]
    result = rule(rows_of(table, parents, cases, torch.stack([own for _, own in states])))
    return [
        Outcome(case.weight, tuple(case.ids[node] for node in nodes), tuple(left))
        for case, nodes, left in zip(cases, result.accepted, result.left.tolist(), strict=True)
    ]


def _with(chances: torch.Tensor, node: int, chance: float) -> torch.Tensor:
    changed = chances.clone()
    changed[node] = chance
    return changed


# -- what a step's outcomes amount to ----------------------------------------------------------------
def mean_accepted(found: Sequence[Outcome]) -> float:
    """Accepted drafts a step."""
    return sum(outcome.weight * len(outcome.ids) for outcome in found)


def text_law(found: Sequence[Outcome], table: torch.Tensor, length: int) -> torch.Tensor:
    """``[V] * length`` float64: the law of the next tokens, what the step gave and plain draws behind it.

    Texts that end sooner, for want of a token to draw, are left out.
    """
    law = torch.zeros((table.shape[-1],) * length, dtype=torch.float64)
    for outcome in found:
        if not any(outcome.left) and len(outcome.ids) >= length:
            _extend(law, table, outcome.ids, outcome.weight)
        for token, share in enumerate(outcome.left):
            _extend(law, table, (*outcome.ids, token), outcome.weight * share)
    return law


def plain_law(table: torch.Tensor, length: int) -> torch.Tensor:
    """The same of plain decoding."""
    law = torch.zeros((table.shape[-1],) * length, dtype=torch.float64)
    _extend(law, table, (), 1.0)
    return law


def _extend(law: torch.Tensor, table: torch.Tensor, text: tuple[int, ...], weight: float) -> None:
    """Spread the probability of ``text`` over its continuations."""
    if len(text) >= law.dim():
        law[text[: law.dim()]] += weight
        return
    for token, share in enumerate(law_behind(table, text).tolist()):
        if share:
            _extend(law, table, (*text, token), weight * share)
