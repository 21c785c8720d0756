"""From a method's config and a checkpoint's headers to what the proposer needs and does."""

from __future__ import annotations

import attrs
from specdecode.contract import (
    EMBED,
    LM_HEAD,
    ConfigError,
    KVSpec,
    Needs,
    Place,
    PlanContext,
    Probs,
    Ranks,
    Shape,
    Tap,
    Unsupported,
)
from specdecode.heads.config import check_dtype
from specdecode.heads.sizing import MOST_NODES
from specdecode.heads.topology import Topology

from .config import DEFAULT_TREE_DEPTH, EagleConfig
from .spec import HeadSpec, read_head


@attrs.frozen(kw_only=True, eq=False)
class Plan:
    """One head, and how it is to draft."""

    head: HeadSpec
    needs: Needs
    topology: Topology | None  #: of a fixed tree
    fanout: int | None  #: children of a node of a tree that grows
    by_cost: bool  #: how many of its nodes are kept is chosen by what steps cost
    greedy: bool  #: a sampled request's drafts are the head's best tokens
    threshold: float | None
    longest: int  #: drafts end at this position


def plan(config: EagleConfig, context: PlanContext) -> Plan:
    """Pure, and torch-free.

    Raises:
        ConfigError, Unsupported: before any weight of the target is read.
    """
    if context.draft is None:
        raise ConfigError("speculative_config.model is missing: name the head's checkpoint")
    target = context.target
    check_dtype(config, context)
    head = read_head(config, context.draft, target)
    topology = config.topology
    fanout, levels = config.tree_top_k, config.tree_depth or DEFAULT_TREE_DEPTH
    by_cost = fanout is not None and config.num_speculative_tokens is None
    width = len(topology) if topology else config.num_speculative_tokens or head.proposed_tokens
    if by_cost and fanout is not None:
        width = min(MOST_NODES, fanout + (levels - 1) * fanout**2)
    if width is None:
        raise ConfigError(
            "speculative_config.num_speculative_tokens is missing, and the checkpoint does not say it"
        )
    depth = width
    if topology is not None:
        depth = topology.depth
    elif fanout is not None:
        depth = min(levels, width)
    widest = topology.fanout if topology is not None else fanout or 1
    choices = target.vocab_size if head.draft_ids is None else len(head.draft_ids)
    if widest > choices:
        raise Unsupported(f"a node cannot have {widest} children: the head drafts from {choices} tokens")
    tree = topology is not None or fanout is not None
    greedy = config.draft_sample_method == "greedy"
    # Which nodes of a grown tree are kept depends on their own scores: it must not tell laws.
    probs = Probs.NONE if greedy or fanout is not None else context.probs
    scratch = len(topology.inner) if topology is not None else (fanout or 1) * (depth - 1)
    modules = set()
    if not head.has("embed_tokens.weight") or head.hidden_size == target.hidden_size:
        modules.add(EMBED)  # a copy is told by comparing, and shared
    if head.lm_head_rows is None:
        modules.add(LM_HEAD)
    needs = Needs(
        width=width,
        depth=depth,
        shape=Shape.TREE if tree else Shape.CHAIN,
        probs=probs,
        place=Place.DEVICE,
        ranks=Ranks.ALL,
        taps=tuple(Tap(boundary) for boundary in dict.fromkeys(head.boundaries)),
        modules=frozenset(modules),
        kv=(
            KVSpec(
                layers=head.num_layers,
                heads=head.num_kv_heads,
                k_dim=head.head_dim,
                v_dim=head.head_dim,
                first=1,
                slots=max(0, scratch - depth),
            ),
        ),
        graphs=probs is Probs.NONE,  # the laws of drafts are the host's to verify
        scores=config.confidence_threshold is not None,  # which only chains have
    )
    return Plan(
        head=head,
        needs=needs,
        topology=topology,
        fanout=fanout,
        by_cost=by_cost,
        greedy=greedy,
        threshold=config.confidence_threshold,
        longest=min(config.max_model_len or target.max_model_len, target.max_model_len),
    )
