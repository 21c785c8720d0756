"""Inputs of steps that are timed before any request came: tokens that differ, each row on blocks of its own.

Where the text decides what a step reads, as in a mixture of experts, one token over and over, or one context
for all, would be no measure: all tokens would choose the same experts. Nobody holds blocks then.
"""

from __future__ import annotations

import torch

#: From one token to the next: a prime, so that they spread over the vocabulary.
_STRIDE = 7919


def distinct_tokens(count: int, vocab_size: int, device: torch.device) -> torch.Tensor:
    """``[count]`` int64 ids, all different while the vocabulary lasts."""
    return torch.arange(count, device=device) * _STRIDE % vocab_size


def own_blocks(rows: int, columns: int, num_blocks: int, device: torch.device) -> torch.Tensor:
    """``[rows, columns]`` int64 tables of different blocks, while they last; never of the null block."""
    return 1 + torch.arange(rows * columns, device=device).view(rows, columns) % num_blocks
