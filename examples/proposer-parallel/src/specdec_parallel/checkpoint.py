"""The drafter's checkpoint: what its ``config.json`` and headers say, and whether it fits the target.

No torch here: a drafter is judged before any weight is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import attrs
from specdecode.contract import CheckpointInfo, ConfigError, KVSpec, Match, TargetInfo, TensorInfo
from specdecode.heads.fields import positive

ARCHITECTURE = "ParallelDrafter"
#: As of :class:`specdecode.contract.Tap`.
Boundary = int | Literal["final"]


@attrs.frozen(kw_only=True)
class DrafterShape:
    """Sizes of a drafter."""

    target_hidden_size: int
    hidden_size: int  #: of the drafter's own stream, narrower than the target's as a rule
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_draft_tokens: int  #: most tokens of a draft: those it was trained for
    taps: tuple[Boundary, ...]  #: where the target's stream is read
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0

    @property
    def rope(self) -> dict[str, Any]:
        return {"rope_type": "default", "rope_theta": self.rope_theta}

    @property
    def kv(self) -> KVSpec:
        """Entry ``j`` is made of token ``j`` and the target's states at ``j - 1``: there is none at 0."""
        return KVSpec(
            layers=self.num_layers,
            heads=self.num_kv_heads,
            k_dim=self.head_dim,
            v_dim=self.head_dim,
            first=1,
        )

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """What the checkpoint holds: name -> shape."""
        hidden, target, mlp = self.hidden_size, self.target_hidden_size, self.intermediate_size
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        found: dict[str, tuple[int, ...]] = {
            "embed_norm.weight": (target,),
            "fc.weight": (hidden, (1 + len(self.taps)) * target),
            "mask": (hidden,),
            "norm.weight": (hidden,),
            "out.weight": (target, hidden),
        }
        found |= {f"tap_norms.{tap}.weight": (target,) for tap in range(len(self.taps))}
        for layer in range(self.num_layers):
            part = {
                "input_layernorm": (hidden,),
                "post_attention_layernorm": (hidden,),
                "self_attn.q_proj": (queries, hidden),
                "self_attn.k_proj": (keys, hidden),
                "self_attn.v_proj": (keys, hidden),
                "self_attn.o_proj": (hidden, queries),
                "mlp.gate_proj": (mlp, hidden),
                "mlp.up_proj": (mlp, hidden),
                "mlp.down_proj": (hidden, mlp),
            }
            found |= {f"layers.{layer}.{name}.weight": shape for name, shape in part.items()}
        return found

    def config(self) -> dict[str, Any]:
        """``config.json``."""
        return {"architectures": [ARCHITECTURE], **attrs.asdict(self), "taps": list(self.taps)}


@attrs.frozen(kw_only=True)
class Drafter:
    """A checkpoint that fits: where it lies, and its sizes."""

    path: Path
    shape: DrafterShape
    dummy: bool  #: there are no weights; random ones will do


def recognize(checkpoint: CheckpointInfo) -> Match | None:
    if ARCHITECTURE in (checkpoint.config.get("architectures") or ()):
        return Match(f"its config says {ARCHITECTURE}")
    return None


def read_shape(draft: CheckpointInfo, target: TargetInfo) -> DrafterShape:
    """The drafter's sizes, judged against its own tensors and the target.

    Raises:
        ConfigError: every fault at once.
    """
    where, config = f"the checkpoint {draft.path}", draft.config
    if recognize(draft) is None:
        raise ConfigError(
            f"{where} is no parallel drafter (config.json names no {ARCHITECTURE}); make one: "
            "specdecode train parallel --model TARGET --data self --out DIRECTORY --steps 300"
        )
    sizes = {
        field.name: positive(config, field.name, where)
        for field in attrs.fields(DrafterShape)
        if field.type in (int, "int")
    }
    if missing := sorted(name for name, value in sizes.items() if value is None):
        raise ConfigError(f"{where}: config.json lacks {', '.join(missing)}; it is damaged")
    numbers = {name: float(config[name]) for name in ("rms_norm_eps", "rope_theta") if name in config}
    shape = DrafterShape(**sizes, **numbers, taps=_taps(config, target, where))  # type: ignore[arg-type]
    if shape.num_heads % shape.num_kv_heads:
        raise ConfigError(
            f"{where}: num_heads {shape.num_heads} is no multiple of num_kv_heads {shape.num_kv_heads}"
        )
    if shape.target_hidden_size != target.hidden_size:
        raise ConfigError(
            f"{where} reads states of {shape.target_hidden_size} numbers, the target's have "
            f"{target.hidden_size}: it was trained for another model"
        )
    if not draft.dummy:
        _check_tensors(shape, draft.tensors, where)
    return shape


def _taps(config: Mapping[str, Any], target: TargetInfo, where: str) -> tuple[Boundary, ...]:
    taps = config.get("taps")
    good = isinstance(taps, list) and taps and len(set(map(str, taps))) == len(taps)
    if not good or not all(
        tap == "final" or (type(tap) is int and 0 <= tap <= target.num_layers) for tap in taps or ()
    ):
        raise ConfigError(
            f'{where}: taps must be different boundaries, 0 to {target.num_layers} or "final", got {taps!r}'
        )
    return tuple(taps)  # type: ignore[arg-type]


def _check_tensors(shape: DrafterShape, tensors: Mapping[str, TensorInfo], where: str) -> None:
    faults = []
    for name, wanted in shape.tensors().items():
        found = tensors.get(name)
        if found is None:
            faults.append(f"{where} lacks the tensor {name}")
        elif tuple(found.shape) != wanted:
            faults.append(f"{where}: {name} is {tuple(found.shape)}, config.json makes it {wanted}")
    if faults:
        raise ConfigError(*faults)
