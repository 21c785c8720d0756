"""Verification: which drafts become output, and which token follows them."""

import attrs

from specdecode.contract import Unsupported

from .base import Rule, Verdict, Weigh, Weighed, WeighedDrafts, residual
from .block import block
from .invariant import walk
from .standard import standard
from .synthetic import Synthetic
from .typical import Typical

_TYPICAL = Typical()

#: The rules that are built, by their name in ``rejection_sample_method``.
RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule(name="invariant", compare=walk),
        Rule(name="standard", compare=walk, weigh=standard, weigh_in_order=standard),
        Rule(
            name="block",
            compare=walk,
            weigh=block,
            weigh_in_order=standard,
            trees=False,
            keyed_by_base=True,
        ),
        Rule(
            name="typical",
            compare=walk,
            weigh=_TYPICAL.weigh,
            weigh_in_order=_TYPICAL.weigh_in_order,
            shares_noise=True,
            lossless=False,
        ),
        Rule(name="synthetic", compare=walk, trees=False, lossless=False),
    )
}


def rule(name: str, synthetic: Synthetic | None = None, typical: Typical | None = None) -> Rule:
    """The rule that ``rejection_sample_method`` names.

    Args:
        synthetic: the rates of the rule of that name, which has none of its own.
        typical: the thresholds of the rule of that name; None: the authors'.

    Raises:
        Unsupported: no such rule is built.
    """
    if name not in RULES:
        raise Unsupported(
            f"speculative_config.rejection_sample_method={name!r} is not built; "
            f"what works is {', '.join(map(repr, RULES))}"
        )
    if typical is not None:
        return attrs.evolve(RULES[name], weigh=typical.weigh, weigh_in_order=typical.weigh_in_order)
    return attrs.evolve(RULES[name], synthetic=synthetic)


__all__ = [
    "RULES",
    "Rule",
    "Synthetic",
    "Typical",
    "Verdict",
    "Weigh",
    "Weighed",
    "WeighedDrafts",
    "block",
    "residual",
    "rule",
    "standard",
    "walk",
]
