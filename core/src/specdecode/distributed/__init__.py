"""Tensor parallelism: ranks in lockstep, their collectives, and the processes they run in."""

from .group import SOLO, CollectiveGroup, Group
from .shares import Share, head_shares, rows_per_rank, share_of

__all__ = ["SOLO", "CollectiveGroup", "Group", "Share", "head_shares", "rows_per_rank", "share_of"]
