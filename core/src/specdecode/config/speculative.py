"""``speculative_config``: the keys core owns, and all others passed through to the method."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import attrs

from specdecode.contract import ConfigError, Probs, option, within

#: Rules of verification that are declared, those of them that work today, and those that weigh the
#: probabilities of drafters.
RULES = ("invariant", "standard", "block", "typical", "synthetic")
RULES_BUILT = ("invariant", "standard", "block", "synthetic")
RULES_WEIGHING = ("standard", "block")

#: What says how many drafts the synthetic rule accepts: one of them.
SYNTHETIC_KEYS = ("synthetic_acceptance_rates", "synthetic_acceptance_length")


def _built_rule(_: Any, __: Any, value: str) -> None:
    if value not in RULES_BUILT:
        works = " or ".join(repr(rule) for rule in RULES_BUILT)
        raise ValueError(f"must be {works} in this version, got {value!r}, which is not built yet")


def _not_built(remedy: str) -> Any:
    def check(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value != attribute.default:
            raise ValueError(f"must be {attribute.default!r} in this version, got {value!r}: {remedy}")

    return check


def _rates(_: Any, __: Any, value: tuple[float, ...] | None) -> None:
    if value is None:
        return
    if not value or any(not 0 <= rate <= 1 for rate in value) or list(value) != sorted(value, reverse=True):
        raise ValueError(f"must be numbers from 0 to 1, none larger than the one before, got {value!r}")


@attrs.frozen(kw_only=True)
class Policy:
    """The keys of ``speculative_config`` that mean the same for all methods; core alone reads them."""

    method: str | None = option(
        "draft method, or distribution:method; none: the one that recognises the draft checkpoint",
        default=None,
    )
    disable_by_batch_size: int | None = option(
        "no drafts while at least this many requests run; none: never disabled",
        default=None,
        validator=within(2),
    )
    adaptive: bool = option(
        "let core choose the draft length by what it gains",
        default=False,
        validator=_not_built(
            "the draft-length controller is not built yet, set num_speculative_tokens by hand"
        ),
    )
    rejection_sample_method: Literal["invariant", "standard", "block", "typical", "synthetic"] = option(
        "rule of verification; invariant: same seed, same tokens, with and without speculation; "
        "standard, block: the same law only, and more drafts accepted of a drafter that gives probabilities; "
        "synthetic: drafts accepted by a rate, whatever their tokens, to time a method without its weights",
        default="invariant",
        validator=_built_rule,
    )
    synthetic_acceptance_rates: tuple[float, ...] | None = option(
        "under the synthetic rule, for each draft the chance that it and all before it are accepted",
        default=None,
        validator=_rates,
    )
    synthetic_acceptance_length: float | None = option(
        "under the synthetic rule, instead of rates: mean tokens a verification, the target's own counted; "
        "it becomes the rates with the least variance",
        default=None,
        validator=within(1),
    )

    def __attrs_post_init__(self) -> None:
        given = [key for key in SYNTHETIC_KEYS if getattr(self, key) is not None]
        if self.rejection_sample_method == "synthetic":
            if len(given) != 1:
                raise ValueError(
                    f"rejection_sample_method='synthetic' wants one of {' and '.join(SYNTHETIC_KEYS)}, got "
                    f"{'both' if given else 'neither'}"
                )
        elif given:
            raise ValueError(
                f"{' and '.join(given)} have no effect under "
                f"rejection_sample_method={self.rejection_sample_method!r}: set it to 'synthetic', or leave "
                "them out"
            )

    @property
    def probs(self) -> Probs:
        """What the rule of verification has a use for."""
        return Probs.FULL if self.rejection_sample_method in RULES_WEIGHING else Probs.NONE


POLICY_KEYS: tuple[str, ...] = tuple(attribute.name for attribute in attrs.fields(Policy))
_DEFAULTS: dict[str, Any] = {attribute.name: attribute.default for attribute in attrs.fields(Policy)}


class SpeculativeConfig(Mapping[str, Any]):
    """How to speculate, as the user gave it: a read-only mapping, every key an attribute as well.

    The keys of :class:`Policy` always exist as attributes; what was not given has its default. Values are
    checked when an engine is made, all together with the method's own keys.

    Args:
        config: a mapping, a JSON object as a string, or another ``SpeculativeConfig``.
        keys: further keys; they win over those of ``config``.

    Raises:
        ConfigError: ``config`` is no mapping, or a string that is not a JSON object.
    """

    __slots__ = ("_keys",)

    method: str | None
    disable_by_batch_size: int | None
    adaptive: bool
    rejection_sample_method: str
    synthetic_acceptance_rates: tuple[float, ...] | None
    synthetic_acceptance_length: float | None

    def __init__(self, config: Mapping[str, Any] | str | None = None, /, **keys: Any) -> None:
        if isinstance(config, str):
            config = _parse(config)
        elif config is not None and not isinstance(config, Mapping):
            raise ConfigError(
                f"speculative_config must be a mapping, a JSON string or a SpeculativeConfig, got {config!r}"
            )
        self._keys: dict[str, Any] = {**(config or {}), **keys}

    @classmethod
    def of(cls, config: SpeculativeConfig | Mapping[str, Any] | str) -> SpeculativeConfig:
        """``config`` itself if it is one already, else one made of it."""
        return config if isinstance(config, cls) else cls(config)

    @property
    def policy_keys(self) -> dict[str, Any]:
        """The given keys that core owns."""
        return {key: value for key, value in self._keys.items() if key in _DEFAULTS}

    @property
    def method_keys(self) -> dict[str, Any]:
        """The given keys that belong to the method."""
        return {key: value for key, value in self._keys.items() if key not in _DEFAULTS}

    def __getitem__(self, key: str) -> Any:
        return self._keys[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_"):
            if name in self._keys:
                return self._keys[name]
            if name in _DEFAULTS:
                return _DEFAULTS[name]
        raise AttributeError(f"speculative_config has no key {name!r}")

    def __reduce__(self) -> tuple[type[SpeculativeConfig], tuple[dict[str, Any]]]:
        return SpeculativeConfig, (self._keys,)

    def __repr__(self) -> str:
        return f"SpeculativeConfig({self._keys!r})"


def _parse(text: str) -> dict[str, Any]:
    def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = dict(pairs)
        if len(keys) < len(pairs):
            twice = sorted({key for key, _ in pairs if sum(key == other for other, _ in pairs) > 1})
            raise ConfigError(f"speculative_config gives {', '.join(twice)} twice; keep one")
        return keys

    try:
        value = json.loads(text, object_pairs_hook=distinct)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"speculative_config is not valid JSON: {error}; write for example "
            f'{{"method": "NAME", "num_speculative_tokens": 4}}, got {text!r}'
        ) from None
    if not isinstance(value, dict):
        raise ConfigError(f"speculative_config must be a JSON object, got {text!r}")
    return value
