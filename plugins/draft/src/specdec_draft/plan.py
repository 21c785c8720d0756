"""What a draft model needs of core, and everything that can be refused before a weight is read."""

from __future__ import annotations

from pathlib import Path

import attrs
from specdecode.contract import KVSpec, Needs, Place, PlanContext, Probs, Ranks, TargetInfo, Unsupported

from .checkpoint import DraftShape, describe
from .config import DraftModelConfig
from .vocabulary import Vocabulary, match_vocabularies

#: Bytes of a layer that a rank must be spared: what a GPU reads while two sums over the ranks are made.
_SPARED = 24 << 20


@attrs.frozen(kw_only=True)
class Plan:
    """A draft that fits its target."""

    folder: Path
    dummy: bool  #: there are no weights to be read, random ones will do
    shape: DraftShape
    vocabulary: Vocabulary
    dtype: str  #: torch's name of it
    context: int  #: longest text that it drafts for
    ranks: int = 1  #: that share it out; 1: each rank of the target has all of it


def plan(config: DraftModelConfig, context: PlanContext) -> Plan:
    """Fit a draft to its target.

    Raises:
        Unsupported, ConfigError: the reason.
    """
    target, draft = context.target, context.draft
    if draft is None:
        raise Unsupported("a draft model needs a checkpoint: set model")
    shape = describe(draft)
    dtype = config.dtype or ("bfloat16" if config.quantization else target.dtype)
    quantised = bool(config.quantization or draft.config.get("quantization_config"))
    ranks = config.draft_tensor_parallel_size or (1 if quantised else _ranks(shape, dtype, target))
    if ranks not in (1, target.tensor_parallel_size):
        raise Unsupported(
            f"draft_tensor_parallel_size must be 1 or the target's {target.tensor_parallel_size}, got {ranks}"
        )
    if ranks > 1 and not shape.native:
        raise Unsupported(
            f"draft_tensor_parallel_size={ranks} works with drafts of the native families: leave it at 1, "
            "where every rank computes the whole draft"
        )
    if config.quantization and (
        dtype != "bfloat16" or not target.device.startswith("cpu") or not shape.native
    ):
        raise Unsupported(
            f"quantization={config.quantization!r} of a draft works on a CPU, in bfloat16 and for the native "
            f"families, got device {target.device!r} and dtype {dtype!r}: leave quantization or dtype out"
        )
    if config.max_model_len is not None and config.max_model_len > shape.context:
        raise Unsupported(
            f"max_model_len of the draft must be at most {shape.context}, its context length, "
            f"got {config.max_model_len}"
        )
    return Plan(
        folder=draft.path,
        dummy=draft.dummy,
        shape=shape,
        vocabulary=match_vocabularies(Path(target.path), draft.path, target.vocab_size, shape.vocab_size),
        dtype=dtype,
        context=min(config.max_model_len or shape.context, target.max_model_len),
        ranks=ranks,
    )


def _ranks(shape: DraftShape, dtype: str, target: TargetInfo) -> int:
    """How many had better share a draft out: the target's ranks, where reading less is worth the messages."""
    ranks = target.tensor_parallel_size
    if ranks == 1 or target.device.startswith("cpu") or not shape.divides(ranks):
        return 1
    num_bytes = shape.weights * (4 if dtype == "float32" else 2)
    return ranks if num_bytes * (ranks - 1) // ranks >= _SPARED else 1


def needs(config: DraftModelConfig, context: PlanContext) -> Needs:
    """Draft layers on the target's block table, for a chain.

    The step can be captured where the native decoder's kernels run it and where no probabilities are
    weighed, which the host does.
    """
    made = plan(config, context)
    length = config.num_speculative_tokens
    weighed = context.probs is Probs.FULL and config.draft_sample_method == "probabilistic"
    dim = made.shape.head_dim
    return Needs(
        width=length,
        depth=length,
        place=Place.DEVICE,
        ranks=Ranks.ALL,
        probs=Probs.FULL if weighed else Probs.NONE,
        graphs=made.shape.native and made.dtype != "float16" and context.probs is Probs.NONE,
        kv=(
            KVSpec(
                layers=made.shape.layers,
                heads=max(1, made.shape.heads // made.ranks),
                k_dim=dim,
                v_dim=made.shape.value_dim or dim,
                dtype=None if made.dtype == context.target.dtype else made.dtype,
            ),
        ),
    )
