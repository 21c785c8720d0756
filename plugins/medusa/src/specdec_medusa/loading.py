"""Heads with the weights of their checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from specdecode.contract import LM_HEAD, ConfigError, TargetHandle
from specdecode.heads.loading import fill_rows, pack_linears
from specdecode.models import randomize

from .heads import MedusaHeads
from .spec import HeadsSpec


@torch.inference_mode()
def load_heads(spec: HeadsSpec, depth: int, target: TargetHandle) -> MedusaHeads:
    """Build the first ``depth`` heads on the target's device, in its dtype, and fill them.

    A checkpoint without weights gets random ones.

    Raises:
        ConfigError: the files hold less than their headers said.
    """
    heads = MedusaHeads(
        spec,
        depth,
        target_lm_head=target.modules.get(LM_HEAD),
        dtype=target.dtype,
        device=target.device,
    )
    if spec.dummy:
        randomize(heads)
        pack_linears(heads, target.dtype, target.device)
        return heads.eval()
    wanted = {stored: name for name, stored in spec.names.items() if _used(name, spec, depth)}
    missing = set(wanted)
    for stored, tensor in target.load_weights(spec.path, wanted.keys()):
        _fill(heads, wanted[stored], tensor)
        missing.discard(stored)
    if missing:
        raise ConfigError(f"the checkpoint {spec.path} lost {', '.join(sorted(missing))} while it was read")
    pack_linears(heads, target.dtype, target.device)
    return heads.eval()


def _used(name: str, spec: HeadsSpec, depth: int) -> bool:
    kind, *rest = name.split(".")
    if kind == "blocks":
        return int(rest[0]) < depth
    if kind == "out":
        if spec.output == "shared":
            return name == ("out.weight" if "out.weight" in spec.names else "out.0.weight")
        return spec.output == "own" and int(rest[0]) < depth
    return False  # the map was read with the plan


def _fill(heads: MedusaHeads, name: str, tensor: torch.Tensor) -> None:
    kind, *rest = name.split(".")
    if kind == "blocks":
        head, layer, part = rest
        if layer == "0":
            heads.first.load(part, tensor, head)
        else:
            module: Any = heads.get_submodule(f"deeper.{(int(layer) - 1) * heads.depth + int(head)}")
            module.load(part, tensor)
        return
    table: Any = heads.get_submodule(f"out.{0 if heads.one_output else rest[0]}")
    ids = heads.draft_ids
    if ids is not None and len(tensor) != len(ids):
        tensor = tensor[ids.to(tensor.device)]  # a whole layer beside a map
    fill_rows(table.weight.data, tensor)
