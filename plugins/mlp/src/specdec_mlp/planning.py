"""From a method's config and a checkpoint's headers to what the proposer needs and does."""

from __future__ import annotations

import attrs
from specdecode.contract import (
    FINAL,
    ConfigError,
    Needs,
    Place,
    PlanContext,
    Probs,
    Ranks,
    Shape,
    Tokens,
    Unsupported,
)
from specdecode.heads.config import check_dtype
from specdecode.heads.topology import Topology

from .config import MlpSpeculatorConfig
from .spec import SpeculatorSpec, read_speculator


@attrs.frozen(kw_only=True, eq=False)
class Plan:
    """The speculator, and how it is to draft."""

    speculator: SpeculatorSpec
    needs: Needs
    topology: Topology | None  #: of a fixed tree
    fanout: int | None  #: children of a node of a tree that grows
    greedy: bool  #: a sampled request's drafts are the speculator's best tokens
    longest: int  #: drafts end at this position


def plan(config: MlpSpeculatorConfig, context: PlanContext) -> Plan:
    """Pure, and torch-free.

    Raises:
        ConfigError, Unsupported: before any weight of the target is read.
    """
    if context.draft is None:
        raise ConfigError("speculative_config.model is missing: name the speculator's checkpoint")
    target = context.target
    check_dtype(config, context)
    speculator = read_speculator(context.draft, target)
    topology, fanout, steps = config.topology, config.tree_top_k, speculator.n_predict
    if topology is not None:
        width, depth = len(topology), topology.depth
    else:
        width = config.num_speculative_tokens or steps
        depth = width if fanout is None else min(width, steps)
    if depth > steps:
        asked = "num_speculative_tokens is" if topology is None else "speculative_token_tree has the depth"
        raise ConfigError(
            f"speculative_config.{asked} {depth}, and the checkpoint {speculator.path} drafts at most "
            f"n_predict={steps} tokens deep: lower it, or draft a tree"
        )
    widest = topology.fanout if topology is not None else fanout or 1
    if widest > speculator.rows:
        raise Unsupported(
            f"a node cannot have {widest} children: the speculator drafts from {speculator.rows} tokens"
        )
    greedy = config.draft_sample_method == "greedy"
    # Which nodes of a grown tree are kept depends on their own scores: it must not tell laws.
    probs = Probs.NONE if greedy or fanout is not None else context.probs
    needs = Needs(
        width=width,
        depth=depth,
        shape=Shape.CHAIN if topology is None and fanout is None else Shape.TREE,
        probs=probs,
        tokens=Tokens.NEW,
        place=Place.DEVICE,
        ranks=Ranks.ALL,
        taps=(FINAL,),
        graphs=probs is Probs.NONE,  # the laws of drafts are the host's to verify
    )
    return Plan(
        speculator=speculator,
        needs=needs,
        topology=topology,
        fanout=fanout,
        greedy=greedy,
        longest=min(config.max_model_len or target.max_model_len, target.max_model_len),
    )
