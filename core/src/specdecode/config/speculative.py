"""``speculative_config``: the keys core owns, and all others passed through to the method."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import attrs

from specdecode.contract import ConfigError, Probs, option, within

#: Rules of verification that weigh the probabilities of drafters.
RULES_WEIGHING = ("standard", "block")

#: What says how many drafts the synthetic rule accepts: one of them.
SYNTHETIC_KEYS = ("synthetic_acceptance_rates", "synthetic_acceptance_length")

#: What says which drafts the typical rule accepts.
TYPICAL_KEYS = ("posterior_threshold", "posterior_alpha")


def _share(_: Any, __: Any, value: float | None) -> None:
    if value is not None and not 0 < value <= 1:
        raise ValueError(f"must be above 0 and at most 1, got {value!r}")


def _schedule(_: Any, __: Any, value: tuple[tuple[int, int, int], ...] | None) -> None:
    if value is None:
        return
    before = 0
    for low, high, tokens in value:
        if not before < low <= high or tokens < 0 or (before == 0 and low != 1):
            break
        before = high
    else:
        if value:
            return
    raise ValueError(
        "must be entries [low, high, tokens] with low <= high and tokens >= 0, ascending from low = 1, "
        f"got {value!r}"
    )


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
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] | None = option(
        "draft tokens by load: [low, high, tokens] while low to high requests run, ascending from 1; what "
        "lies between two goes on as before; none: as many as the method drafts",
        default=None,
        validator=_schedule,
    )
    adaptive: bool = option(
        "let core choose each request's draft length, each step, by what its drafts gain and what they cost; "
        "the method's own length is the most",
        default=False,
    )
    rejection_sample_method: Literal["invariant", "standard", "block", "typical", "synthetic"] = option(
        "rule of verification; invariant: same seed, same tokens, with and without speculation; "
        "standard, block: the same law only, and more drafts accepted of a drafter that gives probabilities; "
        "typical: lossy, drafts accepted that the target finds likely enough; "
        "synthetic: drafts accepted by a rate, whatever their tokens, to time a method without its weights",
        default="invariant",
    )
    posterior_threshold: float | None = option(
        "under the typical rule, the probability above which a draft is accepted everywhere; none: 0.09",
        default=None,
        validator=_share,
    )
    posterior_alpha: float | None = option(
        "under the typical rule, the factor of exp(-entropy) above which a draft is accepted where that is "
        "less; none: 0.3",
        default=None,
        validator=_share,
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
        if self.adaptive and self.num_speculative_tokens_per_batch_size is not None:
            raise ValueError(
                "adaptive and num_speculative_tokens_per_batch_size both choose the draft length: leave one "
                "out"
            )
        rule = self.rejection_sample_method
        typical = [key for key in TYPICAL_KEYS if getattr(self, key) is not None]
        if typical and rule != "typical":
            raise ValueError(_idle(typical, rule, "typical"))
        given = [key for key in SYNTHETIC_KEYS if getattr(self, key) is not None]
        if rule == "synthetic":
            if len(given) != 1:
                raise ValueError(
                    f"rejection_sample_method='synthetic' wants one of {' and '.join(SYNTHETIC_KEYS)}, got "
                    f"{'both' if given else 'neither'}"
                )
        elif given:
            raise ValueError(_idle(given, rule, "synthetic"))

    @property
    def probs(self) -> Probs:
        """What the rule of verification has a use for."""
        return Probs.FULL if self.rejection_sample_method in RULES_WEIGHING else Probs.NONE


def _idle(keys: list[str], rule: str, meant: str) -> str:
    return (
        f"{' and '.join(keys)} have no effect under rejection_sample_method={rule!r}: set it to {meant!r}, "
        "or leave them out"
    )


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
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] | None
    adaptive: bool
    rejection_sample_method: str
    posterior_threshold: float | None
    posterior_alpha: float | None
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
