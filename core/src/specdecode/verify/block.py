"""Block verification: the drafts of a chain are weighed together.

Sun et al., "Block Verification Accelerates Speculative Decoding" (arXiv 2403.10444), algorithm 2. A
draft that the target likes better than the drafter does makes up for one before it that it likes
less, so that in expectation more drafts are accepted than one by one, and never fewer.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from specdec_kernels.sampling import log_normalizer

from .base import Weighed, WeighedDrafts, residual


def block(drafts: WeighedDrafts) -> Weighed:
    """Accept the longest prefix of each row's chain whose chance lies below what it is kept with.

    Raises:
        ValueError: a row's drafts are no chain.
    """
    every = range(len(drafts.ids))
    for row in every:
        if tuple(drafts.parents[row]) != tuple(range(-1, len(drafts.ids[row]) - 1)):
            raise ValueError(f"block verification wants a chain, got parents {list(drafts.parents[row])}")
    # One entry for each draft of each row, in order.
    rows = [row for row in every for _ in drafts.ids[row]]
    nodes = [node for row in every for node in range(len(drafts.ids[row]))]
    p = drafts.law(rows, [node - 1 for node in nodes])
    q = drafts.drawn_from(rows, nodes, p.shape[-1])
    tokens = drafts.tokens(rows, nodes)
    ratios = _split(drafts, (p.gather(-1, tokens) / q.gather(-1, tokens))[:, 0])
    weights = [_weights(own) for own in ratios]
    weight = torch.tensor([[w] for own in weights for w in own[:-1]], device=p.device).reshape(-1, 1)
    log_mass = log_normalizer((weight * p - q).clamp_(min=0).log())  # each row summed alone, in any batch
    masses = _split(drafts, log_mass.exp().nan_to_num_(0.0))  # NaN where there is nothing
    drawable = _split(drafts, p.amax(dim=-1))

    lengths, wholes = [], []
    for row, chances in zip(every, drafts.chances.tolist(), strict=True):
        # A prefix behind which the target can draw nothing is a whole chain.
        whole = next((i for i, largest in enumerate(drawable[row]) if not largest), len(ratios[row]))
        kept = [*map(_kept, masses[row][:whole], weights[row]), weights[row][whole]]
        lengths.append(max((i for i in range(1, whole + 1) if chances[i - 1] < kept[i]), default=0))
        wholes.append(whole)

    first = [0, *itertools.accumulate(map(len, drafts.ids))]
    left = torch.empty(len(every), p.shape[-1], device=p.device)
    ended = [row for row in every if lengths[row] == wholes[row]]
    if ended:
        left[ended] = drafts.law(ended, [lengths[row] - 1 for row in ended])
    cut = [row for row in every if lengths[row] < wholes[row]]
    if cut:
        rejected = [first[row] + lengths[row] for row in cut]
        left[cut] = residual(p[rejected], q[rejected], weight[rejected])
    return Weighed([tuple(range(length)) for length in lengths], left)


def _weights(ratios: Sequence[float]) -> list[float]:
    """The weight of each prefix, the empty one first: how much of the target's law behind it is at stake."""
    return [*itertools.accumulate(ratios, lambda weight, ratio: min(weight * ratio, 1.0), initial=1.0)]


def _kept(mass: float, weight: float) -> float:
    """Chance to keep a prefix, if no longer one is kept; without a mass a longer one is kept for certain."""
    return mass / (mass + 1 - weight) if mass else 0.0


def _split(drafts: WeighedDrafts, values: torch.Tensor) -> list[list[float]]:
    """One value for each draft, as a list for each row."""
    flat = iter(values.tolist())
    return [[*itertools.islice(flat, len(ids))] for ids in drafts.ids]
