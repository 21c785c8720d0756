"""Tensor parallelism: ranks in lockstep, their collectives, and the processes they run in."""

from .freeing import cleanup_dist_env_and_memory
from .group import SOLO, CollectiveGroup, Group
from .shares import Share, head_shares, rows_per_rank, share_of

__all__ = [
    "SOLO",
    "CollectiveGroup",
    "Group",
    "Share",
    "cleanup_dist_env_and_memory",
    "head_shares",
    "rows_per_rank",
    "share_of",
]
