"""Takes the drafts out of a proposer's buffers, never trusting them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..contract import Drafts
from .feed import FedRow
from .ordering import Taken, in_order
from .request import RowDrafts

#: How far the sum of a law may be from 1: what rounding in float32 gives, and more.
SUM_TOLERANCE = 1e-4


def take_drafts(
    drafts: Drafts,
    rows: Sequence[FedRow],
    vocab_size: int,
    *,
    chain: bool,
    weighed: bool,
    scored: bool = False,
) -> int:
    """Set the drafts of each row's request, without those that break the contract.

    A row is cut at its first id outside the vocabulary, at a parent that does not come before its child
    (in a chain, that is not the node before), and, where probabilities are weighed, at a law that is
    none or that the node's token cannot have come from. Nodes deeper than the row's room are left out.

    Args:
        chain: whether the proposer said that it drafts chains.
        weighed: whether the rule of verification weighs its probabilities.
        scored: keep the scores, if any is not 0.

    Returns:
        How many drafts were dropped by fault.
    """
    lens, ids, parents = (_host(value) for value in (drafts.lens, drafts.ids, drafts.parents))
    faults = 0
    taken: list[Taken] = []
    for index, row in enumerate(rows):
        claimed = max(0, int(lens[index]))
        count = min(claimed, row.budget)
        own, bad = in_order(
            ids[index, :count].tolist(), parents[index, :count].tolist(), row.room, vocab_size, chain=chain
        )
        taken.append(own)
        faults += bad + claimed - count
    laws = _laws(drafts, rows, taken) if weighed else {}
    scores = _host(drafts.score) if scored and drafts.score is not None else None
    if scores is not None and not any(scores[index, own.nodes].any() for index, own in enumerate(taken)):
        scores = None
    for index, (row, own) in enumerate(zip(rows, taken, strict=True)):
        probs, length = laws.get(index, (None, len(own.ids)))
        faults += len(own.ids) - length
        if length:
            told = () if scores is None else tuple(scores[index, own.nodes[:length]].tolist())
            row.request.drafts = RowDrafts(tuple(own.ids[:length]), tuple(own.parents[:length]), probs, told)
    return faults


def _laws(
    drafts: Drafts, rows: Sequence[FedRow], taken: Sequence[Taken]
) -> dict[int, tuple[torch.Tensor, int]]:
    """For each row with drafts that is sampled: the laws of its nodes, and how many of them hold good.

    A greedy request keeps the drafts that are its target's best tokens, by whatever law they came.
    """
    sampled = [i for i, own in enumerate(taken) if own.ids and not rows[i].request.params.greedy]
    if not sampled or drafts.probs is None:
        return {}
    buffer = torch.as_tensor(drafts.probs)
    where = [index for index in sampled for _ in taken[index].nodes]
    nodes = [node for index in sampled for node in taken[index].nodes]
    tokens = torch.tensor([token for index in sampled for token in taken[index].ids], device=buffer.device)
    laws = buffer[where, nodes]  # a copy: the proposer may go on writing
    own = laws.gather(-1, tokens[:, None])[:, 0]
    near = (laws.sum(dim=-1) - 1).abs() <= SUM_TOLERANCE
    good = (near & (laws.amin(dim=-1) >= 0) & (own > 0)).tolist()  # NaN is neither
    found: dict[int, tuple[torch.Tensor, int]] = {}
    start = 0
    for index in sampled:
        end = start + len(taken[index].nodes)
        length = next((i for i, fine in enumerate(good[start:end]) if not fine), end - start)
        found[index] = laws[start : start + length], length
        start = end
    return found


def _host(value: Any) -> np.ndarray:
    return value.cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
