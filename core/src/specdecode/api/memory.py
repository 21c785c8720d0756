"""How much KV fits: the memory plan of an engine."""

from __future__ import annotations

import logging
from typing import Any

import attrs
import torch

from .. import models
from ..contract import ConfigError
from .args import EngineArgs

logger = logging.getLogger(__name__)

#: KV cache on a CPU, unless num_gpu_blocks_override says otherwise. Pages are taken as they are used.
CPU_KV_BYTES = 4 << 30


@attrs.frozen(kw_only=True)
class MemoryPlan:
    """Bytes by use, and the KV blocks that came of it."""

    weight_bytes: int
    scratch_bytes: int
    block_bytes: int
    num_blocks: int
    block_size: int
    max_model_len: int

    @property
    def kv_bytes(self) -> int:
        return self.block_bytes * self.num_blocks


def plan_memory(
    args: EngineArgs,
    model: Any,
    block_bytes: int,
    longest: int,
    device: torch.device,
    *,
    scratch_bytes: int,
) -> MemoryPlan:
    """Size the KV cache; weights of target and draft are on the device already.

    A cache that cannot hold one sequence of the longest length shortens that length, unless the
    user asked for it.

    Raises:
        ConfigError: no block fits, or max_model_len was given and does not.
    """
    size = args.block_size
    wanted = args.max_num_seqs * -(-longest // size)
    if args.num_gpu_blocks_override is not None:
        num_blocks = args.num_gpu_blocks_override
    else:
        num_blocks = min(wanted, _kv_budget(args, device, scratch_bytes) // block_bytes)
    capacity = num_blocks * size
    if capacity < 2:
        raise ConfigError(
            f"gpu_memory_utilization={args.gpu_memory_utilization} leaves no room for a KV block of "
            f"{block_bytes} bytes: raise it, or use a smaller model or dtype"
        )
    if capacity < longest:
        if args.max_model_len is not None:
            raise ConfigError(
                f"max_model_len={args.max_model_len} does not fit: the KV cache holds {capacity} tokens "
                f"({num_blocks} blocks of {size}); lower max_model_len to {capacity}, or raise "
                "num_gpu_blocks_override or gpu_memory_utilization"
            )
        logger.warning(
            "max_model_len is lowered from %d to %d, which is what the KV cache holds", longest, capacity
        )
        longest = capacity
    return MemoryPlan(
        weight_bytes=models.weight_bytes(model),
        scratch_bytes=scratch_bytes,
        block_bytes=block_bytes,
        num_blocks=num_blocks,
        block_size=size,
        max_model_len=longest,
    )


def _kv_budget(args: EngineArgs, device: torch.device, scratch_bytes: int) -> int:
    if device.type != "cuda":
        return CPU_KV_BYTES
    free, total = torch.cuda.mem_get_info(device)
    # Activations of the largest step: a few float32 copies of its widest tensors stay below this share.
    activations = total // 20
    return int(free - total * (1 - args.gpu_memory_utilization)) - activations - scratch_bytes
