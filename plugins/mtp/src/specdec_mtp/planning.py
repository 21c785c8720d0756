"""From the method's config and a checkpoint's headers to what the proposer needs and does."""

from __future__ import annotations

import attrs
from specdecode.contract import (
    EMBED,
    FINAL,
    LM_HEAD,
    KVSpec,
    Needs,
    Place,
    PlanContext,
    Probs,
    Ranks,
    Tap,
)
from specdecode.heads.config import check_dtype

from .config import MtpConfig
from .spec import MtpSpec, read_spec


@attrs.frozen(kw_only=True, eq=False)
class Plan:
    """The modules, and how they are to draft."""

    spec: MtpSpec
    needs: Needs
    modules: int  #: that are used
    raw: bool  #: hidden states are read before the final norm
    greedy: bool  #: a sampled request's drafts are the modules' best tokens
    longest: int  #: drafts end at this position


def plan(config: MtpConfig, context: PlanContext) -> Plan:
    """Pure, and torch-free.

    Raises:
        ConfigError, Unsupported: before any weight of the target is read.
    """
    check_dtype(config, context)
    target = context.target
    spec = read_spec(context)
    width = config.num_speculative_tokens or spec.proposed_tokens
    modules = min(width, len(spec.names))
    greedy = config.draft_sample_method == "greedy"
    probs = Probs.NONE if greedy else context.probs
    raw = config.mtp_hidden_states == "raw"
    return Plan(
        spec=spec,
        needs=Needs(
            width=width,
            depth=width,
            probs=probs,
            place=Place.DEVICE,
            ranks=Ranks.ALL,
            taps=(Tap(target.num_layers) if raw else FINAL,),
            modules=frozenset({EMBED, LM_HEAD}),
            kv=_layers(spec, modules),
            # Laws are the host's to verify; what of transformers' code can be captured is not known.
            graphs=probs is Probs.NONE and spec.block is not None,
        ),
        modules=modules,
        raw=raw,
        greedy=greedy,
        longest=min(config.max_model_len or target.max_model_len, target.max_model_len),
    )


def _layers(spec: MtpSpec, modules: int) -> tuple[KVSpec, ...]:
    """One for each module, and one that keeps the hidden states which a module hands to the next.

    Entry ``j`` of module ``k`` is made of token ``j`` and of what module ``k - 1`` made of token ``j - 1``:
    of tokens from ``k + 1`` on. What was made of the last token of a step is read in the next one; kept
    beside the entries it survives all that they survive.
    """
    layers = tuple(
        KVSpec(layers=1, heads=spec.num_kv_heads, k_dim=spec.head_dim, v_dim=spec.value_dim, first=module + 1)
        for module in range(modules)
    )
    if modules == 1:
        return layers
    half = spec.hidden_size // 2
    return (*layers, KVSpec(layers=modules - 1, heads=1, k_dim=half, v_dim=spec.hidden_size - half, first=1))
