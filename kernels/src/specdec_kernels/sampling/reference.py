"""Transforms of logits, and the draw by Gumbel noise, in torch.

Shapes: ``R`` rows, ``V`` vocabulary, ``N`` entries or rows that a transform concerns. Logits are
``[R, V]`` float32 and are changed in place; what a row excludes becomes -inf. ``rows`` is ``[N]``
int64 without repeats, or None for all ``R`` rows in order.

top-k and top-p are thresholds on the logits, so tokens of equal logit stand or fall together: the
result does not depend on the order of a sort.
"""

from __future__ import annotations

import torch

from specdec_kernels.noise import GUMBEL_MAX, GUMBEL_MIN, gumbel

_OUT = float("-inf")
_WORD = 0xFFFFFFFF
# On a CPU, where a full sort of a row costs more than a forward of a small layer: how many of the
# likeliest tokens top-p looks at before it sorts them all.
_HEAD = 1024


def keep_tokens(
    logits: torch.Tensor, rows: torch.Tensor, entry_rows: torch.Tensor, ids: torch.Tensor
) -> None:
    """Exclude from ``rows`` all tokens but the entries ``(entry_rows, ids)``, both ``[M]`` int64."""
    kept = logits[entry_rows, ids]
    logits[rows] = _OUT
    logits[entry_rows, ids] = kept


def keep_bits(logits: torch.Tensor, rows: torch.Tensor | None, bits: torch.Tensor) -> None:
    """Exclude the tokens whose bit is 0: token ``t`` is bit ``t % 8`` of byte ``t // 8``.

    ``bits``: ``[N, ceil(V / 8)]`` uint8.
    """
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    excluded = ((bits[:, :, None] >> shifts) & 1).flatten(1)[:, : logits.shape[1]] == 0
    if rows is None:
        logits.masked_fill_(excluded, _OUT)
    else:
        logits[rows] = logits[rows].masked_fill_(excluded, _OUT)


def ban_tokens(logits: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor) -> None:
    """Exclude the entries ``(rows, ids)``, both ``[N]`` int64; rows may repeat."""
    logits[rows, ids] = _OUT


def add_bias(logits: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor, bias: torch.Tensor) -> None:
    """Add ``bias`` ``[N]`` float32 to the entries ``(rows, ids)``, each given once."""
    logits[rows, ids] += bias


def penalize(
    logits: torch.Tensor,
    rows: torch.Tensor,
    ids: torch.Tensor,
    counts: torch.Tensor,
    *,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    repetition: torch.Tensor,
) -> None:
    """Penalise the tokens a row's text holds.

    A positive logit is divided by ``repetition`` and a negative one multiplied (Keskar et al.,
    arXiv 1909.05858); then ``frequency * count + presence`` is subtracted if the count is not 0.

    Args:
        logits: ``[R, V]`` float32.
        rows, ids: ``[N]`` int64, each pair once; rows may repeat.
        counts: ``[N]`` float32, occurrences in the output; 0 for a token of the prompt alone.
        presence, frequency, repetition: ``[R]`` float32.
    """
    value, factor = logits[rows, ids], repetition[rows]
    value = torch.where(value > 0, value / factor, value * factor)
    value -= frequency[rows] * counts
    value -= presence[rows] * (counts > 0)
    logits[rows, ids] = value


def scale_temperature(logits: torch.Tensor, temperature: torch.Tensor) -> None:
    """Divide by ``temperature`` ``[R]`` float32; 1 changes no bit."""
    logits /= temperature[:, None]


def keep_min_p(logits: torch.Tensor, rows: torch.Tensor | None, min_p: torch.Tensor) -> None:
    """As :func:`specdec_kernels.sampling.keep_min_p`."""
    part = take(logits, rows)
    keep_from(logits, rows, part, part.amax(dim=-1) + min_p.log())


def keep_top_k(logits: torch.Tensor, rows: torch.Tensor | None, k: torch.Tensor, most: int) -> None:
    """As :func:`specdec_kernels.sampling.keep_top_k`."""
    part = take(logits, rows)
    largest = part.topk(most, dim=-1).values
    keep_from(logits, rows, part, largest.gather(-1, k[:, None] - 1)[:, 0])


def keep_top_p(logits: torch.Tensor, rows: torch.Tensor | None, p: torch.Tensor) -> None:
    """As :func:`specdec_kernels.sampling.keep_top_p`."""
    part = take(logits, rows)
    probs = part.softmax(dim=-1)
    size = part.shape[-1]
    head = min(_HEAD, size) if logits.device.type == "cpu" else size
    while True:
        # The prefix sum over the head is the head of the whole prefix sum, to the bit (on the CPU,
        # where it runs in order), so a row's threshold does not depend on how far others must look.
        order = part.topk(head, dim=-1) if head < size else part.sort(dim=-1, descending=True)
        mass = probs.gather(-1, order.indices).cumsum(dim=-1)
        last = (mass < p[:, None]).sum(dim=-1, keepdim=True)
        if head == size or int(last.max()) < head:
            break
        head = size
    last.clamp_(max=size - 1)  # rounding may leave the whole sum short of p
    keep_from(logits, rows, part, order.values.gather(-1, last)[:, 0])


def log_normalizer(logits: torch.Tensor) -> torch.Tensor:
    """``log(sum(exp(logits)))`` of each row, ``[R]`` float32.

    By way of log_softmax, which reduces each row alone; logsumexp may split a single row among
    threads and so depend on how many rows there are.
    """
    return logits.amax(dim=-1) - logits.log_softmax(dim=-1).amax(dim=-1)


def perturb(
    logits: torch.Tensor,
    seed: torch.Tensor,
    index: torch.Tensor,
    position: torch.Tensor,
    *,
    best: int = 1,
    stream: torch.Tensor | int = 0,
) -> torch.Tensor:
    """As :func:`specdec_kernels.sampling.perturb`."""
    size = logits.shape[-1]
    if logits.device.type == "cpu":
        # The noise is bounded, so a logit too far below the best-th largest cannot win: with top-k
        # or top-p little is left, and noise is made for those tokens alone.
        floor = (
            logits.topk(min(best, size), dim=-1).values[:, -1:] if best > 1 else logits.amax(-1, keepdim=True)
        )
        able = (logits >= floor - (GUMBEL_MAX - GUMBEL_MIN)) & (logits > _OUT)
        rows, ids = able.nonzero(as_tuple=True)
        if 4 * len(rows) < logits.numel():  # one id of its own costs as much as four in a run
            scores = torch.full_like(logits, _OUT)
            key = seed[rows], index[rows], position[rows]
            streams = stream[rows] if isinstance(stream, torch.Tensor) else stream
            noise = gumbel(*key, ids[:, None], stream=streams)
            scores[rows, ids] = logits[rows, ids] + noise[:, 0]
            return scores
    return logits + gumbel(seed, index, position, size, stream=stream)


def top_scores(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``k`` largest of each row in falling order; of equal ones the lowest id comes first.

    Args:
        scores: ``[R, V]`` float32.

    Returns:
        ids ``[R, k]`` int64 and values ``[R, k]`` float32.
    """
    if k == 1:
        ids = scores.argmax(dim=-1, keepdim=True)  # documented to give the first of equal ones
        return ids, scores.gather(-1, ids)
    # topk leaves the order of equal values open, so rank by one integer: the float's bits in an
    # order-preserving form above, the id from the top below. Adding 0 makes -0 equal to 0.
    bits = (scores + 0.0).view(torch.int32)
    bits ^= (bits >> 31).bitwise_and_(0x7FFFFFFF)
    ids = torch.arange(_WORD, _WORD - scores.shape[-1], -1, device=scores.device)
    best = bits.long().bitwise_left_shift_(32).add_(ids).topk(k, dim=-1).values
    ids = _WORD - (best & _WORD)
    return ids, scores.gather(-1, ids)


def take(logits: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    return logits if rows is None else logits[rows]


def keep_from(
    logits: torch.Tensor, rows: torch.Tensor | None, part: torch.Tensor, threshold: torch.Tensor
) -> None:
    """Exclude what is below its row's ``threshold`` ``[N]``; ``part`` is ``logits[rows]``."""
    part.masked_fill_(part < threshold[:, None], _OUT)
    if rows is not None:
        logits[rows] = part
