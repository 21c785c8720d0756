"""The draft method before any weight is read: planned, and held against what core can serve."""

from __future__ import annotations

import functools
import logging
from pathlib import Path

import torch

from .. import models
from ..contract import EXTRA_LAYERS, CheckpointInfo, Needs, Shape, TargetInfo, Unsupported
from ..distributed.proposers import check_ranks
from ..kv.store import draft_layers
from ..plugins import PluginManager, Prepared, prepare, read_checkpoint
from ..verify import Rule, Synthetic, Typical, rule
from .args import EngineArgs
from .drafting_pace import check_schedule

logger = logging.getLogger(__name__)

#: What the output is under a rule that is not lossless.
_LOSSES = {
    "typical": "accepts drafts that the model would not have drawn, where they are likely enough: the output "
    "has not its law, sampled text above all",
    "synthetic": "accepts drafts by rate, whatever their tokens: the output is not the model's. It is for "
    "benchmarks",
}

#: Why a rule cannot decide trees.
_CHAINS_ONLY = {
    "block": ": it weighs the drafts of one path together, and the nodes of a tree belong to several",
    "synthetic": ": it has a rate for each draft of one path",
}


def prepare_proposer(args: EngineArgs, manager: PluginManager, target: TargetInfo) -> Prepared | None:
    if args.speculative_config is None:
        return None
    reader = functools.partial(_read_draft, dummy=args.load_format == "dummy")
    prepared = prepare(manager, args.speculative_config, target, reader=reader)
    verification = rule_of(prepared)
    if args.shadow_rate and (verification.weigh is not None or not verification.lossless):
        raise Unsupported(
            f"shadow_rate={args.shadow_rate} compares tokens with and without speculation, which "
            f"rejection_sample_method={verification.name!r} does not keep equal"
            f"{', only their law' if verification.lossless else ''}: use 'invariant', or leave "
            "shadow_rate out"
        )
    check_needs(prepared.needs, prepared.method, target, verification)
    check_ranks(prepared.needs, prepared.method, target.tensor_parallel_size)
    check_schedule(prepared)
    if verification.mark is not None:
        logger.warning(
            "rejection_sample_method=%r %s, and all that is measured with it is marked as %s",
            verification.name,
            _LOSSES[verification.name],
            verification.mark,
        )
    return prepared


def _read_draft(
    path: str | Path,
    revision: str | None = None,
    *,
    field: str = "speculative_config.model",
    dummy: bool = False,
) -> CheckpointInfo:
    """The headers of a draft checkpoint; a GGUF file is converted first, as a target is."""
    given = Path(path).expanduser()
    if given.is_file() and given.suffix == ".gguf":
        path = models.resolve_model(given).path
    return read_checkpoint(path, revision, field=field, dummy=dummy)


def rule_of(prepared: Prepared | None) -> Rule:
    if prepared is None:
        return rule("invariant")
    policy = prepared.policy
    if policy.rejection_sample_method == "typical":
        defaults = Typical()
        return rule(
            "typical",
            typical=Typical(
                policy.posterior_threshold or defaults.threshold, policy.posterior_alpha or defaults.alpha
            ),
        )
    if policy.rejection_sample_method != "synthetic":
        return rule(policy.rejection_sample_method)
    rates, length = policy.synthetic_acceptance_rates, policy.synthetic_acceptance_length
    return rule("synthetic", Synthetic.of(prepared.needs.width, rates, length))


def check_needs(needs: Needs, method: str, target: TargetInfo, verification: Rule) -> None:
    """Refuse what core cannot serve in this version.

    Raises:
        Unsupported: names the method, the need and what would work.
    """
    if needs.shape is Shape.TREE and not verification.trees:
        raise Unsupported(
            f"{method} drafts trees, and rejection_sample_method={verification.name!r} decides chains only"
            f"{_CHAINS_ONLY.get(verification.name, '')}; use 'standard' or 'invariant', or have the method "
            "draft a chain"
        )
    if EXTRA_LAYERS in needs.modules:
        raise Unsupported(
            f"{method} needs extra layers of the target, which no model family loads in this version"
        )
    for tap in needs.taps:
        if tap.boundary != "final" and tap.boundary not in range(target.num_layers + 1):
            raise Unsupported(
                f"{method} taps boundary {tap.boundary!r}; a target of {target.num_layers} layers has 0 to "
                f"{target.num_layers}"
            )
    for spec in needs.kv:
        try:
            draft_layers(spec, torch.float32)  # any dtype in the place of the target's
        except Unsupported as error:
            raise Unsupported(f"{method} declares layers that cannot be kept: {error}") from None
