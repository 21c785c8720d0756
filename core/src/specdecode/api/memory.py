"""How much KV fits: the memory plan of an engine, and help where memory runs out."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import attrs
import torch

from .. import models
from ..contract import ConfigError
from ..distributed import SOLO, Group
from ..runner.profiling import StepMemory
from .args import EngineArgs

logger = logging.getLogger(__name__)

#: KV cache on a CPU, unless num_gpu_blocks_override says otherwise. Pages are taken as they are used.
CPU_KV_BYTES = 4 << 30
#: What the driver keeps of a captured step of some hundred kernels.
_GRAPH_BYTES = 16 << 20


@attrs.frozen(kw_only=True)
class MemoryPlan:
    """Bytes by use, and the KV blocks that came of it.

    On a GPU all uses but KV are measured before KV takes the rest of what ``gpu_memory_utilization``
    grants. On a CPU only weights, ``scratch_bytes`` and KV are known.
    """

    weight_bytes: int  #: the target's
    scratch_bytes: int  #: what the proposer declared
    block_bytes: int
    num_blocks: int
    block_size: int
    max_model_len: int
    draft_bytes: int = 0  #: what the proposer loaded
    step_bytes: int = 0  #: activations, logits and sampling of the largest step
    adapter_bytes: int = 0  #: slots of adapters
    tap_bytes: int = 0  #: hidden states the proposer reads
    graph_bytes: int = 0  #: kept for captured graphs
    image_bytes: int = 0  #: the largest run of the vision tower, and vectors of images that are kept
    other_bytes: int = 0  #: CUDA itself and whatever else is on the device
    granted_bytes: int = 0  #: the device's memory times ``gpu_memory_utilization``; 0 on a CPU

    @property
    def kv_bytes(self) -> int:
        return self.block_bytes * self.num_blocks

    def table(self) -> str:
        """The plan in lines, in the order in which memory is taken."""
        tokens = self.num_blocks * self.block_size
        uses = [
            ("target's weights", self.weight_bytes, ""),
            ("draft's weights", self.draft_bytes, ""),
            ("adapters", self.adapter_bytes, ""),
            ("CUDA and others", self.other_bytes, ""),
            ("largest step", self.step_bytes, "activations, logits, sampling"),
            ("tapped states", self.tap_bytes, ""),
            ("draft's scratch", self.scratch_bytes, ""),
            ("graphs", self.graph_bytes, "kept for their capture"),
            ("images", self.image_bytes, "the vision tower's run, and vectors that are kept"),
            ("granted", self.granted_bytes, "gpu_memory_utilization"),
        ]
        uses = [use for use in uses if use[1]]
        kv = f"{self.num_blocks:,} blocks of {self.block_size}: {tokens:,} tokens"
        uses.insert(-1 if self.granted_bytes else len(uses), ("KV cache", self.kv_bytes, kv))
        return "\n".join(f"  {name:<17}{size / 2**30:8.2f} GiB  {note}".rstrip() for name, size, note in uses)


def graph_reserve(steps: StepMemory, num_graphs: int) -> int:
    """Bytes to keep for capturing ``num_graphs`` graphs, which share the memory that the largest takes."""
    return steps.decode + num_graphs * _GRAPH_BYTES if num_graphs else 0


def plan_memory(
    args: EngineArgs,
    model: Any,
    block_bytes: int,
    longest: int,
    device: torch.device,
    *,
    scratch_bytes: int,
    draft_bytes: int = 0,
    adapter_bytes: int = 0,
    steps: StepMemory | None = None,
    graph_bytes: int = 0,
    image_bytes: int = 0,
    group: Group = SOLO,
) -> MemoryPlan:
    """Size the KV cache; weights of target and draft are on the device already.

    A cache that cannot hold one sequence of the longest length shortens that length, unless the
    user asked for it.

    Args:
        draft_bytes: of the proposer's weights.
        adapter_bytes: of the adapters' slots.
        steps: what steps take; None: nothing that is known.
        graph_bytes: see :func:`graph_reserve`.
        image_bytes: to keep for images.
        group: of ranks, each with a cache of its own: the smallest counts.

    Raises:
        ConfigError: no block fits, or max_model_len was given and does not.
    """
    steps = steps or StepMemory()
    size = args.block_size
    weight_bytes = models.weight_bytes(model)
    granted, used = _device_memory(args, device)
    plan = MemoryPlan(
        weight_bytes=weight_bytes,
        draft_bytes=draft_bytes,
        adapter_bytes=adapter_bytes,
        scratch_bytes=scratch_bytes,
        step_bytes=steps.largest,
        tap_bytes=steps.taps,
        graph_bytes=graph_bytes,
        image_bytes=image_bytes,
        other_bytes=max(0, used - weight_bytes - draft_bytes - adapter_bytes),
        granted_bytes=granted,
        block_bytes=block_bytes,
        num_blocks=0,
        block_size=size,
        max_model_len=longest,
    )
    if args.num_gpu_blocks_override is not None:
        num_blocks = args.num_gpu_blocks_override
    else:
        wanted = args.max_num_seqs * -(-longest // size)
        reserved = scratch_bytes + steps.largest + steps.taps + graph_bytes + image_bytes
        budget = CPU_KV_BYTES if device.type != "cuda" else granted - used - reserved
        num_blocks = max(0, min(wanted, budget // block_bytes))
    num_blocks = group.least(num_blocks)
    capacity = num_blocks * size
    if capacity < 2:
        raise ConfigError(
            f"gpu_memory_utilization={args.gpu_memory_utilization} leaves no room for a KV block of "
            f"{block_bytes} bytes: raise it, lower max_num_seqs or max_num_batched_tokens, or use a smaller "
            f"model or dtype; the plan was\n{plan.table()}"
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
    plan = attrs.evolve(plan, num_blocks=num_blocks, max_model_len=longest)
    logger.info("memory of %s:\n%s", device, plan.table())
    return plan


def _device_memory(args: EngineArgs, device: torch.device) -> tuple[int, int]:
    """Bytes that may be used of a GPU, and those in use, by whomever; what torch only caches is not."""
    if device.type != "cuda":
        return 0, 0
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return int(total * args.gpu_memory_utilization), total - free


@attrs.define
class Growth:
    """Bytes that torch's tensors on the device grew by; known when the stage is over."""

    num_bytes: int = 0


@contextlib.contextmanager
def stage(
    doing: str, device: torch.device, *, remedy: str, plan: MemoryPlan | None = None
) -> Iterator[Growth]:
    """A part of start-up that takes memory of a GPU: measured, and explained where there is not enough.

    Args:
        doing: for the message, as in "loading the weights".
        remedy: what to change, as in "use a smaller model".
        plan: shown if there is one already.

    Raises:
        ConfigError: the device ran out of memory.
    """
    growth = Growth()
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    try:
        yield growth
    except RuntimeError as error:  # torch.OutOfMemoryError, or the driver's own where no tensor is made
        if device.type != "cuda" or "out of memory" not in str(error):
            raise
        raise ConfigError(_explanation(doing, device, remedy, plan)) from error
    if device.type == "cuda":
        growth.num_bytes = max(0, torch.cuda.memory_allocated(device) - before)


def _explanation(doing: str, device: torch.device, remedy: str, plan: MemoryPlan | None) -> str:
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    own = torch.cuda.memory_allocated(device)
    text = (
        f"{device} ran out of memory while {doing}: of {total / 2**30:.1f} GiB {free / 2**30:.1f} are free, "
        f"{own / 2**30:.1f} are this process's tensors and the rest is CUDA's or another process's; {remedy}"
    )
    return text if plan is None else f"{text}; the plan was\n{plan.table()}"
