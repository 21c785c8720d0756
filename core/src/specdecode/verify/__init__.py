"""Verification: which drafts become output, and which token follows them."""

from specdecode.contract import Unsupported

from .base import Rule, Verdict
from .invariant import walk

#: Name in ``rejection_sample_method`` -> rule.
RULES: dict[str, Rule] = {"invariant": walk}


def rule(name: str) -> Rule:
    """The rule that ``rejection_sample_method`` names.

    Raises:
        Unsupported: no such rule is built.
    """
    if name not in RULES:
        raise Unsupported(
            f"speculative_config.rejection_sample_method={name!r} is not built; "
            f"what works is {', '.join(map(repr, RULES))}"
        )
    return RULES[name]


__all__ = ["RULES", "Rule", "Verdict", "rule", "walk"]
