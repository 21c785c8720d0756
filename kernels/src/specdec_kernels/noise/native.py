"""The noise by the C++ kernels: their words are the reference's, and its logarithms are taken of them."""

from __future__ import annotations

import torch

from ..native import library
from .reference import to_gumbel, to_uniform


def can_draw(
    seed: torch.Tensor,
    index: torch.Tensor,
    position: torch.Tensor,
    token_ids: torch.Tensor | int,
    stream: torch.Tensor | int,
) -> bool:
    """Whether all are on a CPU, in int64."""
    given = [own for own in (seed, index, position, token_ids, stream) if isinstance(own, torch.Tensor)]
    return all(own.is_cpu and own.dtype is torch.int64 for own in given) and library() is not None


def gumbel(
    seed: torch.Tensor,
    index: torch.Tensor,
    position: torch.Tensor,
    token_ids: torch.Tensor | int,
    *,
    stream: torch.Tensor | int = 0,
) -> torch.Tensor:
    return to_gumbel(_words(seed, index, position, token_ids, stream))


def uniform(
    seed: torch.Tensor,
    index: torch.Tensor,
    position: torch.Tensor,
    token_ids: torch.Tensor,
    *,
    stream: torch.Tensor | int = 0,
) -> torch.Tensor:
    return to_uniform(_words(seed, index, position, token_ids, stream))


def _words(
    seed: torch.Tensor,
    index: torch.Tensor,
    position: torch.Tensor,
    token_ids: torch.Tensor | int,
    stream: torch.Tensor | int,
) -> torch.Tensor:
    """As the reference has them, ``[R, K]`` float32."""
    if not isinstance(stream, torch.Tensor):
        stream = torch.full_like(seed, stream)
    keys = [own.expand_as(seed).contiguous() for own in (seed, index, position, stream)]
    ids = token_ids.contiguous() if isinstance(token_ids, torch.Tensor) else None
    columns = token_ids if isinstance(token_ids, int) else token_ids.shape[-1]
    out = torch.empty(len(seed), columns)
    library().specdec_noise_words(  # type: ignore[union-attr]  # `can_draw` asked for it
        *(key.data_ptr() for key in keys),
        None if ids is None else ids.data_ptr(),
        out.data_ptr(),
        len(seed),
        columns,
        0 if ids is None or ids.dim() == 1 else columns,
        torch.get_num_threads(),
    )
    return out
