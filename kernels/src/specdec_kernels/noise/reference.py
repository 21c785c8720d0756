"""Philox4x32-10 and the Gumbel noise made from it, in torch integer arithmetic.

Philox: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC'11.
A 32-bit word is held in an int64, since torch has no unsigned multiply with a high half.
"""

from __future__ import annotations

import math

import torch

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF

# The uniform v lies in [2**-33, 1 - 2**-24]: its largest value is the last float32 below 1.
_LARGEST_UNIFORM = 1.0 - 2.0**-24
#: Bounds of :func:`gumbel`, a little wider than the rounding of the logarithms.
GUMBEL_MIN = -math.log(-math.log(2.0**-24)) - 1e-4
GUMBEL_MAX = -math.log(-math.log1p(-(2.0**-33))) + 1e-4

# Philox blocks worked on at a time: on a CPU the words of a chunk stay in cache, elsewhere this
# bounds the memory of the intermediate words.
_CPU_CHUNK = 1 << 15
_DEVICE_CHUNK = 1 << 22

_Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox4x32(counter: _Words, key: tuple[torch.Tensor, torch.Tensor], *, rounds: int = 10) -> _Words:
    """The Philox4x32 bijection of ``counter`` under ``key``.

    Args:
        counter: four int64 tensors of words in ``0..2**32-1``, broadcast against each other.
        key: two such tensors.
        rounds: 10 for the full-strength generator.

    Returns:
        Four int64 tensors of words in ``0..2**32-1``.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        # The 64-bit products wrap, which keeps their bits; the sign that >> drags in and the high
        # half left in c1 and c3 go with the mask of the word that takes them up.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = ((p1 >> 32) ^ c1 ^ k0) & _WORD, ((p0 >> 32) ^ c3 ^ k1) & _WORD
        c1, c3 = p1, p0
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1 & _WORD, c2, c3 & _WORD


def gumbel(
    seed: torch.Tensor,
    index: torch.Tensor,
    position: torch.Tensor,
    token_ids: torch.Tensor | int,
    *,
    stream: torch.Tensor | int = 0,
) -> torch.Tensor:
    """As :func:`specdec_kernels.noise.gumbel`."""
    stream = torch.as_tensor(stream, device=seed.device).expand_as(seed)
    columns = token_ids if isinstance(token_ids, int) else token_ids.shape[-1]
    blocks = -(-columns // 4) if isinstance(token_ids, int) else columns
    chunk = _CPU_CHUNK if seed.device.type == "cpu" else _DEVICE_CHUNK
    step = max(1, chunk // max(blocks, 1))
    if seed.shape[0] <= step:
        return _gumbel(seed, index, position, token_ids, stream)
    noise = torch.empty((seed.shape[0], columns), dtype=torch.float32, device=seed.device)
    for start in range(0, seed.shape[0], step):
        rows = slice(start, start + step)
        ids = token_ids[rows] if isinstance(token_ids, torch.Tensor) and token_ids.dim() == 2 else token_ids
        noise[rows] = _gumbel(seed[rows], index[rows], position[rows], ids, stream[rows])
    return noise


def uniform(
    seed: torch.Tensor,
    index: torch.Tensor,
    position: torch.Tensor,
    token_ids: torch.Tensor,
    *,
    stream: torch.Tensor | int = 0,
) -> torch.Tensor:
    """As :func:`specdec_kernels.noise.uniform`."""
    stream = torch.as_tensor(stream, device=seed.device).expand_as(seed)
    return to_uniform(_words(seed, index, position, token_ids, stream))


def _gumbel(
    seed: torch.Tensor,
    index: torch.Tensor,
    position: torch.Tensor,
    token_ids: torch.Tensor | int,
    stream: torch.Tensor,
) -> torch.Tensor:
    return to_gumbel(_words(seed, index, position, token_ids, stream))


def _words(
    seed: torch.Tensor,
    index: torch.Tensor,
    position: torch.Tensor,
    token_ids: torch.Tensor | int,
    stream: torch.Tensor,
) -> torch.Tensor:
    """The random word of each token, as a float32 of its own."""
    if isinstance(token_ids, int):
        blocks = torch.arange(-(-token_ids // 4), device=seed.device)
    else:
        blocks = token_ids >> 2
    words = philox4x32(
        (blocks, position[:, None], index[:, None], stream[:, None]),
        ((seed & _WORD)[:, None], (seed >> 32 & _WORD)[:, None]),
    )
    if isinstance(token_ids, int):
        return torch.stack([word.float() for word in words], dim=-1).flatten(1)[:, :token_ids]
    lane = token_ids & 3
    low = torch.where(lane == 0, words[0], words[1])
    high = torch.where(lane == 2, words[2], words[3])
    return torch.where(lane < 2, low, high).float()


def to_uniform(word: torch.Tensor) -> torch.Tensor:
    """Turn float32 words into numbers between 0 and 1, in place."""
    return word.add_(0.5).mul_(2.0**-32).clamp_(max=_LARGEST_UNIFORM)


def to_gumbel(word: torch.Tensor) -> torch.Tensor:
    """Turn float32 words into Gumbel noise, in place."""
    return to_uniform(word).neg_().log1p_().neg_().log_().neg_()
