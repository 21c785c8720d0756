"""A speculator with the weights of its checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from specdecode.contract import ConfigError, TargetHandle
from specdecode.heads.loading import fill_rows, pack_linears
from specdecode.models import randomize

from .layouts import source
from .spec import SpeculatorSpec
from .speculator import MlpSpeculator


@torch.inference_mode()
def load_speculator(spec: SpeculatorSpec, depth: int, target: TargetHandle) -> MlpSpeculator:
    """Build the first ``depth`` steps on the target's device, in its dtype, and fill them.

    A checkpoint without weights gets random ones.

    Raises:
        ConfigError: the files hold less than their headers said.
    """
    speculator = MlpSpeculator(spec, depth, dtype=target.dtype, device=target.device)
    if spec.dummy:
        randomize(speculator)
        pack_linears(speculator, target.dtype, target.device)
        return speculator.eval()
    used = {source(f"{name.split('.')[0]}.{step}.{name.split('.')[2]}", tied=spec.tied)
            for name in spec.names for step in range(depth)}  # fmt: skip
    wanted = {stored: name for name, stored in spec.names.items() if name in used}
    missing = set(wanted)
    for stored, tensor in target.load_weights(spec.path, wanted.keys()):
        kind, step, part = wanted[stored].split(".")
        module: Any = speculator.get_submodule(f"{kind}.{step}")
        fill_rows(getattr(module, part).data, tensor)
        missing.discard(stored)
    if missing:
        raise ConfigError(f"the checkpoint {spec.path} lost {', '.join(sorted(missing))} while it was read")
    pack_linears(speculator, target.dtype, target.device)
    return speculator.eval()
