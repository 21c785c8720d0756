"""From a method's config and a checkpoint's headers to what the proposer needs and does."""

from __future__ import annotations

import attrs
from specdecode.contract import (
    FINAL,
    LM_HEAD,
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
from specdecode.heads.topology import Topology, parse_tree

from .choices import PUBLISHED, within
from .config import CHAIN, MedusaConfig
from .spec import HeadsSpec, read_heads


@attrs.frozen(kw_only=True, eq=False)
class Plan:
    """The heads, and how they are to draft."""

    heads: HeadsSpec
    needs: Needs
    topology: Topology  #: of a chain, too
    greedy: bool  #: a sampled request's drafts are the heads' best tokens
    longest: int  #: drafts end at this position


def plan(config: MedusaConfig, context: PlanContext) -> Plan:
    """Pure, and torch-free.

    Raises:
        ConfigError, Unsupported: before any weight of the target is read.
    """
    target = context.target
    check_dtype(config, context)
    heads = read_heads(context.target_checkpoint if context.draft is None else context.draft, target)
    topology = _topology(config, heads)
    choices = target.vocab_size if heads.draft_ids is None else len(heads.draft_ids)
    if topology.fanout > choices:
        raise Unsupported(
            f"a node cannot have {topology.fanout} children: the heads draft from {choices} tokens"
        )
    chain = topology.parents == tuple(range(-1, len(topology) - 1)) and not any(topology.ranks)
    greedy = config.draft_sample_method == "greedy"
    probs = Probs.NONE if greedy else context.probs
    needs = Needs(
        width=len(topology),
        depth=topology.depth,
        shape=Shape.CHAIN if chain else Shape.TREE,
        probs=probs,
        tokens=Tokens.NONE,
        place=Place.DEVICE,
        ranks=Ranks.ALL,
        taps=(FINAL,),
        modules=frozenset({LM_HEAD}) if heads.output == "target" else frozenset(),
        graphs=probs is Probs.NONE,  # the laws of drafts are the host's to verify
    )
    longest = min(config.max_model_len or target.max_model_len, target.max_model_len)
    return Plan(heads=heads, needs=needs, topology=topology, greedy=greedy, longest=longest)


def _topology(config: MedusaConfig, heads: HeadsSpec) -> Topology:
    tree, nodes = config.speculative_token_tree, config.num_speculative_tokens
    if tree is None and heads.choices is None:
        tree = CHAIN
    if tree == CHAIN:
        depth = heads.num_heads if nodes is None else nodes
        if depth > heads.num_heads:
            raise ConfigError(
                f"speculative_config.num_speculative_tokens is {depth}, and the checkpoint {heads.path} has "
                f"{heads.num_heads} heads, one for each token of a chain: lower it, or draft a tree"
            )
        return Topology.from_paths([(0,) * length for length in range(1, depth + 1)])
    if tree is None or (isinstance(tree, str) and tree in PUBLISHED):
        listed = heads.choices if tree is None else PUBLISHED[str(tree)]
        assert listed is not None
        return Topology.from_paths(parse_tree(within(listed, heads=heads.num_heads, nodes=nodes)))
    topology = Topology.from_paths(parse_tree(tree))
    if topology.depth > heads.num_heads:
        raise ConfigError(
            f"speculative_config.speculative_token_tree has {topology.depth} levels, and the checkpoint "
            f"{heads.path} has {heads.num_heads} heads, one for each level"
        )
    return topology
