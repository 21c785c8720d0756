"""What each scripted proposer declares."""

from __future__ import annotations

from typing import Any

import attrs

from ...contract import (
    EMBED,
    FINAL,
    LM_HEAD,
    KVSpec,
    LengthFields,
    Memory,
    Needs,
    Place,
    PlanContext,
    Probs,
    Ranks,
    Shape,
    Tap,
    TargetInfo,
    Tokens,
    Unsupported,
)
from . import wrapping
from .config import (
    CascadeConfig,
    EagleConfig,
    FaultyConfig,
    FlakyConfig,
    MedusaConfig,
    OracleTreeConfig,
    RecorderConfig,
    SamplerConfig,
    SelfDraftConfig,
    SmallDraftConfig,
    WrongConfig,
)


def chain(config: LengthFields, ctx: PlanContext) -> Needs:
    """A host chain that reads each row's history."""
    count = config.num_speculative_tokens
    return Needs(width=count, depth=count, tokens=Tokens.HISTORY)


def oracle_tree(config: OracleTreeConfig, ctx: PlanContext) -> Needs:
    return Needs(
        width=config.num_speculative_tokens, depth=config.levels, shape=Shape.TREE, tokens=Tokens.HISTORY
    )


def faulty(config: FaultyConfig, ctx: PlanContext) -> Needs:
    count = config.num_speculative_tokens
    place = Place.DEVICE if config.place == "device" else Place.HOST
    return Needs(width=count, depth=count, shape=Shape.TREE, tokens=Tokens.HISTORY, place=place)


def wrong(config: WrongConfig, ctx: PlanContext) -> Needs:
    """An oracle's or a draft model's, but for what the fault wants."""
    if config.fault in _WRONG_DRAFT_MODELS:
        layers, graphs = _WRONG_DRAFT_MODELS[config.fault]
        needs = _draft_model(config, _target_kv(ctx.target, layers=layers or ctx.target.num_layers), ctx)
        return attrs.evolve(needs, graphs=graphs)
    return attrs.evolve(chain(config, ctx), **_WRONG.get(config.fault, {}))


#: Fault of a draft model -> its layers (None: all of the target's), and whether it declares graphs.
_WRONG_DRAFT_MODELS: dict[str, tuple[int | None, bool]] = {
    "stale-entries": (None, False),
    "loses-its-place": (None, False),
    "counts-padding": (1, True),
    "rebinds-state": (None, True),
    "copies-indices": (None, True),
}

#: Fault -> what its proposer declares otherwise than an oracle.
_WRONG: dict[str, dict[str, Any]] = {
    "waits": {"place": Place.DEVICE},
    "reads-undeclared": {"tokens": Tokens.NEW},
    "doubles-resumed": {"tokens": Tokens.NEW},
    "reaches-around": {"tokens": Tokens.NEW},
    "declares-taps": {"taps": (FINAL,)},
    "remembers-namespaces": {"memory": Memory.NAMESPACE},
    "spoils-target": {"modules": frozenset({EMBED})},
    "takes-revenge": {"modules": frozenset({EMBED})},
}


def flaky(config: FlakyConfig, ctx: PlanContext) -> Needs:
    return attrs.evolve(wrapping.union_of([config.inner], ctx), graphs=False)  # it counts its calls


def self_draft(config: SelfDraftConfig, ctx: PlanContext) -> Needs:
    return _draft_model(config, _target_kv(ctx.target, layers=config.layers or ctx.target.num_layers), ctx)


def small_draft(config: SmallDraftConfig, ctx: PlanContext) -> Needs:
    assert ctx.draft is not None  # core reads the checkpoint that ``model`` names
    draft = ctx.draft.config
    heads = draft["num_attention_heads"]
    dim = draft.get("head_dim") or draft["hidden_size"] // heads
    kv_heads = draft.get("num_key_value_heads") or heads
    return _draft_model(
        config, KVSpec(layers=draft["num_hidden_layers"], heads=kv_heads, k_dim=dim, v_dim=dim), ctx
    )


def eagle(config: EagleConfig, ctx: PlanContext) -> Needs:
    return Needs(
        width=config.num_speculative_tokens,
        depth=config.levels,
        shape=Shape.TREE if config.tree or config.fanout else Shape.CHAIN,
        place=Place.DEVICE,
        ranks=Ranks.ALL,
        taps=_eagle_taps(config, ctx.target),
        modules=frozenset({EMBED, LM_HEAD}),
        kv=(_target_kv(ctx.target, layers=1, first=1, slots=max(0, config.scratch - config.levels)),),
        graphs=True,
    )


def medusa(config: MedusaConfig, ctx: PlanContext) -> Needs:
    return Needs(
        width=len(config.topology),
        depth=config.topology.depth,
        shape=Shape.TREE,
        place=Place.DEVICE,
        ranks=Ranks.ALL,
        tokens=Tokens.NONE,
        taps=(FINAL,),
        modules=frozenset({LM_HEAD}),
        graphs=True,
    )


def sampler(config: SamplerConfig, ctx: PlanContext) -> Needs:
    return Needs(
        width=len(config.topology),
        depth=config.topology.depth,
        shape=Shape.TREE if config.tree else Shape.CHAIN,
        probs=Probs.FULL if config.tells == "law" else Probs.NONE,
        place=Place.DEVICE,
        ranks=Ranks.ALL,
    )


def cascade(config: CascadeConfig, ctx: PlanContext) -> Needs:
    return wrapping.union_of(config.children, ctx)


def recorder(config: RecorderConfig, ctx: PlanContext) -> Needs:
    """The inner proposer's, and the history; what it writes down is on the host."""
    return attrs.evolve(wrapping.union_of([config.inner], ctx), tokens=Tokens.HISTORY, graphs=False)


def _draft_model(config: LengthFields, kv: KVSpec, ctx: PlanContext) -> Needs:
    count = config.num_speculative_tokens
    return Needs(
        width=count,
        depth=count,
        place=Place.DEVICE,
        ranks=Ranks.ALL,
        kv=(kv,),
        probs=ctx.probs,
        graphs=ctx.probs is Probs.NONE,  # the laws of drafts are the host's to verify
    )


def _target_kv(target: TargetInfo, *, layers: int, first: int = 0, slots: int = 0) -> KVSpec:
    dim = target.head_dim
    return KVSpec(layers=layers, heads=target.num_kv_heads, k_dim=dim, v_dim=dim, first=first, slots=slots)


def _eagle_taps(config: EagleConfig, target: TargetInfo) -> tuple[Tap, ...]:
    if not config.three_taps:
        return (FINAL,)
    if target.num_layers < 2:
        raise Unsupported(f"three taps want a target of at least 2 layers, got {target.num_layers}")
    return (Tap(0), Tap(target.num_layers // 2), Tap(target.num_layers))
