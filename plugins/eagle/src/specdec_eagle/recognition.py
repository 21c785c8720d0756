"""Which draft checkpoints are EAGLE's, told by their tensors; variants that are refused are known too."""

from __future__ import annotations

from specdecode.contract import CheckpointInfo, Match

from .names import canonical

_FIRST = "layers.0.self_attn."
#: Values of ``speculators_model_type`` and ``architectures`` that name a method where the tensors do not.
_NAMED = {
    "eagle": "eagle",
    "EagleSpeculator": "eagle",
    "LlamaForCausalLMEagle": "eagle",
    "EagleLlamaForCausalLM": "eagle",
    "eagle3": "eagle3",
    "peagle": "eagle3",
    "Eagle3Speculator": "eagle3",
    "Eagle3DraftModel": "eagle3",
    "LlamaForCausalLMEagle3": "eagle3",
    "Eagle3LlamaForCausalLM": "eagle3",
    "Eagle3DeepseekV2ForCausalLM": "eagle3",
    "Eagle3Qwen3ForCausalLM": "eagle3",
}


def kind_of(checkpoint: CheckpointInfo) -> tuple[str | None, str]:
    """``"eagle"``, ``"eagle3"`` or None, and what tells."""
    shapes = {canonical(name): info.shape for name, info in checkpoint.tensors.items()}
    query, out = shapes.get(f"{_FIRST}q_proj.weight"), shapes.get(f"{_FIRST}o_proj.weight")
    fuse = shapes.get("fc.weight")
    if query is not None and out is not None and len(query) == len(out) == 2:
        hidden = out[0]
        if query[1] == 2 * hidden:
            return "eagle3", f"its first layer takes 2 x {hidden} inputs"
        if query[1] == hidden and fuse == (hidden, 2 * hidden):
            return "eagle", f"fc.weight is [{hidden}, {2 * hidden}]"
        if fuse is None:
            return None, "it has no fc.weight, and its first layer is an ordinary one"
    if "layers.0.hidden_norm.weight" in shapes:
        return "eagle3", "its first layer has a hidden_norm"
    config = checkpoint.config
    for value in (config.get("speculators_model_type"), *(config.get("architectures") or ())):
        if value in _NAMED:
            return _NAMED[value], f"its config says {value}"
    return None, "neither its tensors nor its config say so"


def recognize_eagle(checkpoint: CheckpointInfo) -> Match | None:
    kind, reason = kind_of(checkpoint)
    return Match(reason) if kind == "eagle" else None


def recognize_eagle3(checkpoint: CheckpointInfo) -> Match | None:
    kind, reason = kind_of(checkpoint)
    return Match(reason) if kind == "eagle3" else None
