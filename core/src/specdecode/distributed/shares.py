"""Which part of a weight belongs to which rank: arithmetic alone, without torch."""

from __future__ import annotations

import attrs

from ..contract import ConfigError


@attrs.frozen
class Share:
    """``start..start+size-1`` of ``whole`` rows (``dim=0``) or columns (``dim=1``) of a stored tensor."""

    dim: int
    start: int
    size: int
    whole: int

    @property
    def is_whole(self) -> bool:
        return self.size == self.whole

    @property
    def index(self) -> tuple[slice, ...]:
        """For slicing the tensor."""
        return (slice(None),) * self.dim + (slice(self.start, self.start + self.size),)


def share_of(whole: int, rank: int, ranks: int, *, dim: int = 0, what: str = "size") -> Share:
    """An equal share; ConfigError naming ``what`` if ``whole`` cannot be divided."""
    if whole % ranks:
        raise ConfigError(
            f"tensor_parallel_size={ranks} does not divide the model's {what} {whole}: use a divisor of it"
        )
    size = whole // ranks
    return Share(dim, rank * size, size, whole)


def head_shares(num_heads: int, num_kv_heads: int, rank: int, ranks: int) -> tuple[Share, Share]:
    """The query heads and the KV heads of a rank, counted in heads.

    With fewer KV heads than ranks each is held by several ranks: those whose query heads read it.

    Raises:
        ConfigError: the heads cannot be divided.
    """
    queries = share_of(num_heads, rank, ranks, what="num_attention_heads")
    if num_kv_heads >= ranks:
        return queries, share_of(num_kv_heads, rank, ranks, what="num_key_value_heads")
    if ranks % num_kv_heads:
        raise ConfigError(
            f"tensor_parallel_size={ranks} is no multiple of the model's num_key_value_heads {num_kv_heads}: "
            "use a multiple or a divisor of it"
        )
    return queries, Share(0, rank * num_kv_heads // ranks, 1, num_kv_heads)


def rows_per_rank(vocab_size: int, ranks: int) -> int:
    """Rows of a table over the vocabulary that each rank holds; the last rank's may end in padding."""
    return -(-vocab_size // ranks)
