"""Prompt lookup over whole batches in torch: every place of a text is compared with its end."""

from __future__ import annotations

import torch


def match_ngrams(
    history: torch.Tensor,
    lengths: torch.Tensor,
    *,
    shortest: int,
    longest: int,
    width: int,
    limits: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As :func:`specdec_kernels.matching.match_ngrams`."""
    if history.device.type == "cpu" and len(lengths):  # which can be asked how far the texts reach
        history = history[:, : max(int(lengths.max()), 1)]
    size = history.shape[1]
    starts = torch.arange(size, device=history.device)
    # window[p]: how many of the last tokens, up to the longest, are those before place p too.
    window = torch.zeros(history.shape, dtype=torch.int64, device=history.device)
    equal = (starts >= 1) & (starts < lengths[:, None])
    for back in range(min(longest, size)):
        end = history.gather(1, (lengths - 1 - back).clamp(0, size - 1)[:, None])
        before = history[:, (starts - 1 - back).clamp(min=0)]
        equal = equal & (before == end) & (starts - 1 - back >= 0)
        window += equal
    # The longest window first, of those the latest place.
    best = torch.where(window >= shortest, window * size + starts, 0).amax(dim=1)
    window, start = best // size, best % size
    length = trusted_length(window, longest, width)
    length = torch.where(best > 0, torch.minimum(length, limits), 0).clamp(0, width)
    places = torch.arange(width, device=history.device)
    period = (lengths - start).clamp(min=1)
    where = (start[:, None] + places % period[:, None]).clamp(0, size - 1)
    ids = torch.where(places < length[:, None], history.gather(1, where).long(), 0)
    return ids, length, torch.where(length > 0, window, 0)


def trusted_length(window: torch.Tensor, longest: int, width: int) -> torch.Tensor:
    """How many tokens to copy from behind a match: 1, 2, 4, 8 for 2, 3, 4, 5 tokens; all for the longest."""
    doubling = torch.ones_like(window) << (window - 2).clamp(0, 30)
    return torch.where(window == longest, width, doubling)
