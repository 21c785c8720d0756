"""Laws instead of draws: the probabilities that a row draws its token with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from specdec_kernels import sampling as kernels
from specdec_kernels.noise import uniform

from .batch import SampleRow, SamplingBatch
from .sampler import UNDRAWABLE, transform

_OUT = float("-inf")
#: The logit of what is never drafted: no noise lifts it, its probability is 0, and sums stay finite where a
#: request allows nothing else.
_NEVER = -1e30


def whole_logits(logits: torch.Tensor, vocabulary: torch.Tensor | None, size: int) -> torch.Tensor:
    """Logits of some tokens among those of all.

    Args:
        logits: ``[R, Vd]`` floating point.
        vocabulary: ``[Vd]`` int64, the token of each column; None: column ``j`` is token ``j``.
        size: tokens there are, ``V``.

    Returns:
        ``[R, V]``, float32 where tokens were missing.
    """
    missing = size - logits.shape[1]
    if vocabulary is not None:
        whole = torch.full((len(logits), size), _NEVER, device=logits.device)
        return whole.index_copy_(1, vocabulary, logits.float())
    if missing:
        return torch.nn.functional.pad(logits.float(), (0, missing), value=_NEVER)
    return logits


def law(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """The law of :func:`~specdecode.sampling.draw`.

    Args:
        logits: ``[R, V]`` floating point, left as they are.

    Returns:
        ``[R, V]`` float32; each row sums to 1, or is all 0 where no token can be drawn. A greedy row
        has all its mass on one token.

    Raises:
        ProcessorFault: a row's logits processor raised or gave no logits.
    """
    transformed = transform(logits, batch)
    best, top = kernels.top_scores(transformed, 1)
    point = torch.zeros_like(transformed).scatter_(-1, best, 1.0)
    noise = batch.noise
    certain = top == torch.inf  # a logits processor forces the token
    if noise is None:
        certain.fill_(True)
    elif noise.rows is not None:
        greedy = torch.ones(len(transformed), dtype=torch.bool, device=transformed.device)
        greedy[noise.rows] = False
        certain |= greedy[:, None]
    probs = torch.where(certain, point, transformed.softmax(dim=-1))
    return torch.where(top > _OUT, probs, 0.0)


def laws_in_order(probs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The law of each of ``ids`` if they are drawn one after the other, none of them twice.

    Args:
        probs: ``[T, V]`` float32, the law of the first.
        ids: ``[T, k]`` int64, in the order drawn.

    Returns:
        ``[T, k, V]`` float32, each row of it with sum 1: ``probs`` without the earlier ids. Where that
        leaves nothing for an id, no draw was made, and its law has all mass on the id.
    """
    left = probs.log()
    laws = []
    for place in range(ids.shape[1]):
        own = ids[:, place, None]
        point = torch.zeros_like(left).scatter_(-1, own, 1.0)
        laws.append(torch.where(left.gather(-1, own) > _OUT, left.softmax(dim=-1), point))
        left = left.scatter(-1, own, _OUT)
    return torch.stack(laws, dim=1)


def draw_from(probs: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """A token of each law, with each row's noise.

    Args:
        probs: ``[R, V]`` float32, sums of any size.

    Returns:
        ``[R]`` int64; :data:`UNDRAWABLE` for a law that is all 0.
    """
    scores = kernels.perturb(probs.log(), *_keys(rows, probs.device), stream=_streams(rows, probs.device))
    ids, best = kernels.top_scores(scores, 1)
    return torch.where(best > _OUT, ids, UNDRAWABLE)[:, 0]


def chances(rows: Sequence[SampleRow], ids: Sequence[int], device: torch.device) -> torch.Tensor:
    """A uniform number for each row and one id of it, ``[R]`` float32, never 0 and never 1."""
    tokens = torch.tensor(ids, dtype=torch.int64, device=device)[:, None]
    return uniform(*_keys(rows, device), tokens, stream=_streams(rows, device))[:, 0]


def _keys(rows: Sequence[SampleRow], device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    keys = torch.tensor(
        [(row.seed, row.index, row.position) for row in rows], dtype=torch.int64, device=device
    ).reshape(-1, 3)
    return keys[:, 0], keys[:, 1], keys[:, 2]


def _streams(rows: Sequence[SampleRow], device: torch.device) -> torch.Tensor:
    return torch.tensor([row.stream for row in rows], dtype=torch.int64, device=device)
