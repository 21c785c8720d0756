"""From the method's keys and a checkpoint's headers to what the proposer needs; no torch here."""

from __future__ import annotations

import attrs
from specdecode.contract import (
    EMBED,
    LM_HEAD,
    ConfigError,
    Needs,
    Place,
    PlanContext,
    Probs,
    Ranks,
    Tap,
    Tokens,
)
from specdecode.heads.config import check_dtype

from .checkpoint import Drafter, read_shape
from .config import ParallelConfig


@attrs.frozen(kw_only=True)
class Plan:
    """A drafter, and how it is to draft."""

    drafter: Drafter
    needs: Needs
    greedy: bool  #: a sampled request's drafts are the drafter's best tokens
    longest: int  #: drafts end at this position


def plan(config: ParallelConfig, context: PlanContext) -> Plan:
    """Pure.

    Raises:
        ConfigError, Unsupported: before any weight of the target is read.
    """
    check_dtype(config, context)
    draft, target = context.draft, context.target
    assert draft is not None  # `model` has no default
    shape = read_shape(draft, target)
    length = config.num_speculative_tokens or shape.num_draft_tokens
    if length > shape.num_draft_tokens:
        raise ConfigError(
            f"speculative_config.num_speculative_tokens is {length}, and the checkpoint {draft.path} was "
            f"trained for {shape.num_draft_tokens}: lower it, or train another"
        )
    greedy = config.draft_sample_method == "greedy"
    probs = Probs.NONE if greedy else context.probs
    needs = Needs(
        width=length,
        depth=length,
        tokens=Tokens.NEW,
        place=Place.DEVICE,
        probs=probs,
        taps=tuple(Tap(boundary) for boundary in shape.taps),
        modules=frozenset({EMBED, LM_HEAD}),
        kv=(shape.kv,),
        graphs=probs is Probs.NONE,  # laws are the host's to weigh
        ranks=Ranks.ALL,
    )
    return Plan(
        drafter=Drafter(path=draft.path, shape=shape, dummy=draft.dummy),
        needs=needs,
        greedy=greedy,
        longest=min(config.max_model_len or target.max_model_len, target.max_model_len),
    )
