"""The draw from logits to tokens in one call, in torch: no host number but the shapes, and none asked back.

``N = B * tokens_per_row`` rows of logits, of which row ``n`` has the parameters of row
``n // tokens_per_row``. What it draws is what the transforms of :mod:`.reference`, one after the other,
would: temperature, min_p, top_k, top_p, then the noise. A row of temperature 0 is greedy: its largest
logit as it is.
"""

from __future__ import annotations

import torch

from specdec_kernels.noise import gumbel

from .reference import keep_min_p, keep_top_k, keep_top_p, log_normalizer, perturb, top_scores

_OUT = float("-inf")
_Filter = torch.Tensor | None


def draw_tokens(
    logits: torch.Tensor,
    positions: torch.Tensor,
    *,
    seed: torch.Tensor,
    index: torch.Tensor,
    temperature: torch.Tensor | None,
    top_k: _Filter = None,
    top_p: _Filter = None,
    min_p: _Filter = None,
    tokens_per_row: int = 1,
    stream: int = 0,
    ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """As :func:`specdec_kernels.sampling.draw_tokens`."""
    transformed = _transformed(logits, temperature, top_k, top_p, min_p, tokens_per_row)
    scores = _scores(transformed, positions, seed, index, temperature, tokens_per_row, stream, ids, best=1)
    drawn, best = _top_scores(scores, 1, ids)
    return torch.where(best > _OUT, drawn, -1)[:, 0]  # of NaN neither


def rank_tokens(
    logits: torch.Tensor,
    positions: torch.Tensor,
    *,
    k: int,
    seed: torch.Tensor,
    index: torch.Tensor,
    temperature: torch.Tensor | None,
    top_k: _Filter = None,
    top_p: _Filter = None,
    min_p: _Filter = None,
    tokens_per_row: int = 1,
    stream: int = 0,
    ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`specdec_kernels.sampling.rank_tokens`."""
    transformed = _transformed(logits, temperature, top_k, top_p, min_p, tokens_per_row)
    scores = _scores(transformed, positions, seed, index, temperature, tokens_per_row, stream, ids, best=k)
    ranked, best = _top_scores(scores, k, ids)
    return ranked, best - log_normalizer(transformed)[:, None]


def _transformed(
    logits: torch.Tensor,
    temperature: torch.Tensor | None,
    top_k: _Filter,
    top_p: _Filter,
    min_p: _Filter,
    tokens_per_row: int,
) -> torch.Tensor:
    """``[N, V]`` float32 logits of the distributions drawn from; greedy rows as they are."""
    if temperature is None:
        return logits.float()
    size = logits.shape[-1]
    greedy = (temperature == 0).repeat_interleave(tokens_per_row)
    spread = temperature.repeat_interleave(tokens_per_row)
    x = logits.float() / torch.where(greedy, 1.0, spread)[:, None]
    filters = [
        None if own is None else own.repeat_interleave(tokens_per_row) for own in (min_p, top_k, top_p)
    ]
    own_min, own_k, own_p = filters
    off = torch.zeros_like(greedy)
    uses_min = off if own_min is None else (own_min > 0) & ~greedy
    uses_k = off if own_k is None else (own_k > 0) & (own_k < size) & ~greedy
    uses_p = off if own_p is None else (own_p < 1) & ~greedy
    if x.device.type == "cpu":  # which can be asked: only the rows that have a filter pay for it
        for own, uses in ((own_min, uses_min), (own_k, uses_k), (own_p, uses_p)):
            rows = uses.nonzero()[:, 0]
            if own is None or not len(rows):
                continue
            values = own[rows]
            if own is own_min:
                keep_min_p(x, rows, values)
            elif own is own_k:
                keep_top_k(x, rows, values, int(values.max()))
            else:
                keep_top_p(x, rows, values)
        return x
    if own_min is None and own_k is None and own_p is None:
        return x
    ordered = x.sort(dim=-1, descending=True).values
    floor = torch.full_like(ordered[:, 0], _OUT)
    if own_min is not None:
        floor = torch.where(uses_min, ordered[:, 0] + own_min.log(), floor)
    if own_k is not None:
        smallest = ordered.gather(-1, own_k.clamp(1, size)[:, None] - 1)[:, 0]
        floor = torch.where(uses_k, torch.maximum(floor, smallest), floor)
    if own_p is not None:
        mass = ordered.masked_fill(ordered < floor[:, None], _OUT).softmax(dim=-1).cumsum(dim=-1)
        last = (mass < own_p[:, None]).sum(dim=-1, keepdim=True).clamp_(max=size - 1)
        floor = torch.where(uses_p, torch.maximum(floor, ordered.gather(-1, last)[:, 0]), floor)
    return x.masked_fill_(x < floor[:, None], _OUT)


def _scores(
    transformed: torch.Tensor,
    positions: torch.Tensor,
    seed: torch.Tensor,
    index: torch.Tensor,
    temperature: torch.Tensor | None,
    tokens_per_row: int,
    stream: int,
    ids: torch.Tensor | None,
    *,
    best: int,
) -> torch.Tensor:
    if temperature is None:
        return transformed
    sampled = (temperature != 0).repeat_interleave(tokens_per_row)
    key = seed.repeat_interleave(tokens_per_row), index.repeat_interleave(tokens_per_row), positions
    if ids is not None:
        noise = gumbel(*key, ids, stream=stream)
        return torch.where(sampled[:, None], transformed + noise, transformed)
    if transformed.device.type != "cpu":
        noisy = perturb(transformed, *key, best=best, stream=stream)
        return torch.where(sampled[:, None], noisy, transformed)
    rows = sampled.nonzero()[:, 0]
    if not len(rows):
        return transformed
    scores = transformed.clone()
    scores[rows] = perturb(transformed[rows], *(own[rows] for own in key), best=best, stream=stream)
    return scores


def _top_scores(scores: torch.Tensor, k: int, ids: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`top_scores`, with the ids that columns stand for."""
    if ids is None:
        return top_scores(scores, k)
    order = ids.argsort()  # of equal scores the lowest id comes first
    places, best = top_scores(scores[:, order], k)
    return ids[order][places], best
