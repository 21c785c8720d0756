"""Which checkpoints are MLP speculators, told by their tensors first."""

from __future__ import annotations

from specdecode.contract import CheckpointInfo, Match

from .layouts import canonical

#: What the first step has, whatever is tied.
_FIRST = frozenset({"emb.0.weight", "proj.0.weight", "head.0.weight", "ln.0.weight"})
_SAID = ("mlp_speculator", "MLPSpeculatorPreTrainedModel", "ArcticMLPSpeculatorPreTrainedModel")
#: Of the same family, and refused by name once it is looked at.
_LSTM = "ArcticLSTMSpeculatorPreTrainedModel"


def kind_of(checkpoint: CheckpointInfo) -> str | None:
    """What tells that it is one; None if nothing does."""
    if _FIRST.issubset(map(canonical, checkpoint.tensors)):
        return "it has emb.0, proj.0, head.0 and ln.0"
    config = checkpoint.config
    for value in (config.get("model_type"), *(config.get("architectures") or ())):
        if value in (*_SAID, _LSTM):
            return f"its config says {value}"
    return None


def recognize(checkpoint: CheckpointInfo) -> Match | None:
    reason = kind_of(checkpoint)
    return Match(reason) if reason else None
