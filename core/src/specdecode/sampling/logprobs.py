"""Log-probabilities of the target's own distribution, before any transform."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from specdec_kernels.sampling import top_scores


@attrs.frozen
class RowLogprobs:
    """One drawn token and the likeliest ones; the drawn token is entry 0 and is not repeated."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    ranks: tuple[int, ...]  #: 1 + the number of tokens that are strictly likelier


def gather_logprobs(
    raw_logits: torch.Tensor, chosen: Sequence[int] | torch.Tensor, num: int
) -> list[RowLogprobs]:
    """Log-probabilities of the chosen token of each row and of its ``num`` likeliest.

    Args:
        raw_logits: ``[R, V]`` floating point, as the target gave them.
        chosen: ``[R]`` the tokens drawn.
        num: how many of the likeliest, 0 or more; -1 for the whole vocabulary.

    Returns:
        One entry a row; its likeliest tokens in falling order, of equal ones the lowest id first.
    """
    logprobs = raw_logits.float().log_softmax(dim=-1)
    chosen = torch.as_tensor(chosen, dtype=torch.int64, device=logprobs.device)[:, None]
    own = logprobs.gather(-1, chosen)
    rank = (logprobs > own).sum(dim=-1, keepdim=True) + 1
    vocab_size = logprobs.shape[-1]
    num = vocab_size if num < 0 else min(num, vocab_size)
    ids, values = top_scores(logprobs, num) if num else (chosen[:, :0], own[:, :0])
    host_ids = torch.cat((chosen, rank, ids), dim=-1).tolist()
    host_values = torch.cat((own, values), dim=-1).tolist()
    return [_row(*pair) for pair in zip(host_ids, host_values, strict=True)]


def _row(ids: list[int], values: list[float]) -> RowLogprobs:
    token, own_rank, *top = ids
    own, *top_values = values
    tokens, logprobs, ranks = [token], [own], [own_rank]
    rank = 1
    for place, (other, value) in enumerate(zip(top, top_values, strict=True), 1):
        if place > 1 and value < top_values[place - 2]:
            rank = place
        if other != token:
            tokens.append(other)
            logprobs.append(value)
            ranks.append(rank)
    return RowLogprobs(tuple(tokens), tuple(logprobs), tuple(ranks))
