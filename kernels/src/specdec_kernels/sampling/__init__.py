"""From logits to the distribution a request asked for, and the draw from it.

The transforms work on ``[R, V]`` float32 logits, in place where the name is a verb on the logits, and a row's
result never depends on the other rows, to the bit. :func:`draw_tokens` and :func:`rank_tokens` go all the
way, from logits in any dtype, with static shapes and nothing asked of the host.
"""

from __future__ import annotations

from types import ModuleType

import torch

from ..gpu import takes
from . import drawing, reference
from .reference import (
    add_bias,
    ban_tokens,
    keep_bits,
    keep_tokens,
    log_normalizer,
    penalize,
    scale_temperature,
    top_scores,
)

#: The most ranks the kernels look for, one after the other; more are left to a sort.
_MOST_RANKS = 16


def keep_min_p(logits: torch.Tensor, rows: torch.Tensor | None, min_p: torch.Tensor) -> None:
    """Keep the tokens at least ``min_p`` ``[N]`` times as likely as the row's likeliest."""
    if _on_gpu(logits):
        from . import gpu

        gpu.keep(logits, rows, min_p=min_p)
    else:
        reference.keep_min_p(logits, rows, min_p)


def keep_top_k(logits: torch.Tensor, rows: torch.Tensor | None, k: torch.Tensor, most: int) -> None:
    """Keep the ``k`` ``[N]`` int64 largest logits of each row, and all that equal the smallest of them.

    Args:
        most: the largest of ``k``, at most ``V``; a host number, so that nothing waits for the device.
    """
    if _on_gpu(logits):
        from . import gpu

        gpu.keep(logits, rows, top_k=k)
    else:
        reference.keep_top_k(logits, rows, k, most)


def keep_top_p(logits: torch.Tensor, rows: torch.Tensor | None, p: torch.Tensor) -> None:
    """Keep the smallest set of largest logits whose probabilities sum to ``p`` ``[N]`` or more.

    All that equal the smallest kept logit are kept. ``0 < p < 1``; the likeliest token always stays.
    """
    if _on_gpu(logits):
        from . import gpu

        gpu.keep(logits, rows, top_p=p)
    else:
        reference.keep_top_p(logits, rows, p)


def perturb(
    logits: torch.Tensor,
    seed: torch.Tensor,
    index: torch.Tensor,
    position: torch.Tensor,
    *,
    best: int = 1,
    stream: torch.Tensor | int = 0,
) -> torch.Tensor:
    """Logits plus Gumbel noise: the largest is a draw from ``softmax(logits)``, the ``best`` largest
    are that many draws without replacement (Kool, van Hoof and Welling, arXiv 1903.06059).

    Args:
        logits: ``[R, V]`` float32, left as it is.
        seed, index, position, stream: ``[R]`` int64, the key of each row's noise; see
            :func:`specdec_kernels.noise.gumbel`.
        best: how many of the largest results of each row will be looked at. What cannot be among
            them may come back as -inf.

    Returns:
        ``[R, V]`` float32.
    """
    if _on_gpu(logits):
        from ..noise import gpu

        return gpu.perturb(logits, seed, index, position, stream=stream)
    return reference.perturb(logits, seed, index, position, best=best, stream=stream)


def draw_tokens(
    logits: torch.Tensor,
    positions: torch.Tensor,
    *,
    seed: torch.Tensor,
    index: torch.Tensor,
    temperature: torch.Tensor | None,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    tokens_per_row: int = 1,
    stream: int = 0,
    ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draw the token of each row of logits: the largest of logits / temperature plus Gumbel noise.

    ``N = B * tokens_per_row`` rows of logits; row ``n`` has the parameters of row ``n // tokens_per_row``.
    Temperature comes first, then min_p, top_k and top_p, each seeing what the earlier ones left; what is
    equal to the last kept is kept. Of equal scores the lowest id wins. The same key draws the same token,
    whatever stands beside it (:func:`specdec_kernels.noise.gumbel`).

    Args:
        logits: ``[N, V]`` floating point, left as they are.
        positions: ``[N]`` int64, of the tokens to be drawn.
        seed, index: ``[B]`` int64, of each row's noise.
        temperature: ``[B]`` float32, 0 for the largest logit as it is; None: all rows are so.
        top_k: ``[B]`` int64, 0: off. None: off for all, as with the next two.
        top_p: ``[B]`` float32, 1: off.
        min_p: ``[B]`` float32, 0: off.
        stream: separates draws that must be independent of each other.
        ids: ``[V]`` int64, the token that each column stands for, by which noise is keyed and which is what
            comes out; no two alike. None: the columns' numbers.

    Returns:
        ``[N]`` int64; -1 where NaN is among the logits or none of them is above -inf.
    """
    return _drawing(logits).draw_tokens(
        logits,
        positions,
        seed=seed,
        index=index,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        tokens_per_row=tokens_per_row,
        stream=stream,
        ids=ids,
    )


def rank_tokens(
    logits: torch.Tensor,
    positions: torch.Tensor,
    *,
    k: int,
    seed: torch.Tensor,
    index: torch.Tensor,
    temperature: torch.Tensor | None,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    tokens_per_row: int = 1,
    stream: int = 0,
    ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``k`` likeliest outcomes of :func:`draw_tokens`, the first being its result.

    Args:
        k: ``1..V``.

    Returns:
        ids ``[N, k]`` int64 and scores ``[N, k]`` float32: log-probability plus noise (rows of temperature
        0: no noise) in falling order; -inf for ids that cannot be drawn.
    """
    return _drawing(logits, k).rank_tokens(
        logits,
        positions,
        k=k,
        seed=seed,
        index=index,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        tokens_per_row=tokens_per_row,
        stream=stream,
        ids=ids,
    )


def _drawing(logits: torch.Tensor, ranks: int = 1) -> ModuleType:
    if _on_gpu(logits) and ranks <= _MOST_RANKS:
        from . import gpu

        return gpu
    return drawing


def _on_gpu(logits: torch.Tensor) -> bool:
    return logits.is_cuda and takes(logits) and logits.stride(-1) == 1


__all__ = [
    "add_bias",
    "ban_tokens",
    "draw_tokens",
    "keep_bits",
    "keep_min_p",
    "keep_tokens",
    "keep_top_k",
    "keep_top_p",
    "log_normalizer",
    "penalize",
    "perturb",
    "rank_tokens",
    "scale_temperature",
    "top_scores",
]
