"""Other spellings of ``speculative_config`` that scripts written for vLLM use.

Flat keywords, old keys, and names of methods that mean another (``hints.toml``) become the one
mapping that the engine reads. Old ones are told about in one warning that prints this mapping.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from ..config import SpeculativeConfig
from ..contract import ConfigError
from ..plugins.hints import not_methods, other_spellings

logger = logging.getLogger(__name__)

ROOT = "speculative_config"

#: Keywords of today's vLLM that say the same as a key of ``speculative_config``.
FLAT = {"spec_method": "method", "spec_model": "model", "spec_tokens": "num_speculative_tokens"}

#: Keywords of its older versions; inside ``speculative_config`` they were accepted as keys, too.
OLD = {
    "speculative_model": "model",
    "speculative_model_quantization": "quantization",
    "num_speculative_tokens": "num_speculative_tokens",
    "speculative_draft_tensor_parallel_size": "draft_tensor_parallel_size",
    "speculative_max_model_len": "max_model_len",
    "speculative_disable_by_batch_size": "disable_by_batch_size",
    "ngram_prompt_lookup_max": "prompt_lookup_max",
    "ngram_prompt_lookup_min": "prompt_lookup_min",
    "spec_decoding_acceptance_method": "rejection_sample_method",
    "typical_acceptance_sampler_posterior_threshold": "posterior_threshold",
    "typical_acceptance_sampler_posterior_alpha": "posterior_alpha",
}

#: Old names of rules of verification, and today's.
OLD_RULES = {"rejection_sampler": "invariant", "typical_acceptance_sampler": "typical"}


@attrs.frozen(kw_only=True)
class Said:
    """One key of ``speculative_config``, and how the user said it."""

    source: str
    key: str
    value: Any
    given: Any  #: the value as the user wrote it
    old: bool = False
    note: str = ""

    def __str__(self) -> str:
        return f"{self.source}={self.given!r}"


def modernise(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """``keywords`` with all that is said of speculation in ``speculative_config``, as written today.

    Raises:
        ConfigError: ``speculative_config`` is no mapping, two spellings of a key contradict each
            other, or a method is none here.
    """
    rest = {name: value for name, value in keywords.items() if name not in FLAT and name not in OLD}
    said: dict[str, Said] = {}
    for one in map(_as_today, _said(keywords)):
        other = said.get(one.key)
        if other is not None and other.value != one.value:
            raise ConfigError(f"{one} contradicts {other}: keep one of them")
        if other is None or one.old:
            said[one.key] = one
    if said or rest.get(ROOT) is not None:
        rest[ROOT] = SpeculativeConfig({key: one.value for key, one in said.items()})
        _warn([one for one in said.values() if one.old], rest[ROOT])
    return rest


def _warn(old: Sequence[Said], config: SpeculativeConfig) -> None:
    if old:
        spellings = ", ".join(map(str, old))
        notes = "".join(f"; {one.note}" for one in old if one.note)
        logger.warning("%s: old spelling; write %s=%r%s", spellings, ROOT, dict(config), notes)


def _said(keywords: Mapping[str, Any]) -> Iterator[Said]:
    """All that is said of speculation; None says nothing in a flat keyword."""
    nested = keywords.get(ROOT)
    for name, value in (SpeculativeConfig.of(nested) if nested is not None else {}).items():
        key = OLD.get(name, name)
        yield Said(source=f"{ROOT}.{name}", key=key, value=value, given=value, old=key != name)
    for name, value in keywords.items():
        if value is not None and (name in FLAT or name in OLD):
            key = FLAT.get(name) or OLD[name]
            yield Said(source=name, key=key, value=value, given=value, old=name in OLD)


def _as_today(said: Said) -> Said:
    """``said`` with today's key and value."""
    if not isinstance(said.value, str):
        return said
    if said.key in ("method", "model"):
        if said.key == "method" and (reason := not_methods().get(said.value)):
            raise ConfigError(f"{said} is refused: {reason}")
        if spelling := other_spellings().get(said.value):
            return attrs.evolve(said, key="method", value=spelling.method, old=True, note=spelling.note)
    if said.key == "rejection_sample_method" and said.value in OLD_RULES:
        return attrs.evolve(said, value=OLD_RULES[said.value], old=True)
    return said
