"""SamplingParams: how one request is to be decoded."""

from __future__ import annotations

import difflib
import enum
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from specdecode.contract import ConfigError
from specdecode.sampling.processors import takes_prompt
from specdecode.structured.params import FIELD, StructuredOutputsParams, from_guided

from .not_offered import FIELDS as NOT_OFFERED

#: Below this temperature a request is greedy.
GREEDY_TEMPERATURE = 1e-5
#: Most completions of one prompt.
MAX_COMPLETIONS = 16384


class RequestOutputKind(enum.Enum):
    """What each output of a running request holds."""

    CUMULATIVE = 0  #: everything so far
    DELTA = 1  #: what is new since the last output
    FINAL_ONLY = 2  #: nothing until the request has finished


def _texts(value: Any) -> Any:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else _sequence(value)


def _sequence(value: Any) -> Any:
    """A tuple of a list-like value; what is none stays as it is and is refused by name later."""
    if value is None:
        return ()
    if isinstance(value, Sequence | set | frozenset) and not isinstance(value, str | bytes):
        return tuple(value)
    return value


def _sequence_or_none(value: Any) -> Any:
    return None if value is None else _sequence(value)


def _mapping_or_none(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value


def _off_if_false(value: Any) -> Any:
    """``speculation``: True says nothing beyond the engine's setting, False is a length of 0."""
    return {True: None, False: 0}[value] if isinstance(value, bool) else value


def _structure(value: Any) -> Any:
    """What is no structure stays as it is and is refused later, together with all other faults."""
    try:
        return None if value is None else StructuredOutputsParams.of(value)
    except ConfigError:
        return value


def _guided(value: Any) -> Any:
    try:
        return None if value is None else from_guided(value)
    except ConfigError:
        return value


def _integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)


def _assigned(params: SamplingParams, field: attrs.Attribute[Any], value: Any) -> Any:
    """What an assignment stores: checked with all other fields as they are, or refused."""
    if params.is_snapshot:
        raise AttributeError(f"{field.name} cannot be assigned: a snapshot is what a queued request keeps")
    return getattr(attrs.evolve(params, **{field.name: value}), field.name)


@attrs.define(kw_only=True, on_setattr=_assigned)
class SamplingParams:
    """How one request is decoded; names and defaults are vLLM's. ``docs/sampling.md`` has all rules.

    Everything is checked at construction, and again at each assignment: one :class:`ConfigError`
    names every bad field, its value and the allowed range, and a refused assignment changes
    nothing. The engine works on a :meth:`snapshot`, so that what is assigned later never reaches a
    queued request. The seed gives the same tokens with and without speculation, alone and in any
    batch.
    """

    #: completions of the prompt
    n: int = 1
    #: subtracted once from the logit of every token that the output holds; -2..2
    presence_penalty: float = 0.0
    #: subtracted for each time the output holds the token; -2..2
    frequency_penalty: float = 0.0
    #: divides the positive and multiplies the negative logits of tokens in prompt or output; 1 is off
    repetition_penalty: float = 1.0
    #: divides the logits; below 1e-5 the request is greedy and top_k, top_p, min_p have no effect
    temperature: float = 1.0
    #: keep the smallest set of likeliest tokens that holds this mass; 1 is off
    top_p: float = 1.0
    #: keep the k likeliest tokens and those equal to the k-th; 0 and -1 are off
    top_k: int = 0
    #: keep the tokens at least this fraction as likely as the likeliest; 0 is off
    min_p: float = 0.0
    #: any integer, taken modulo 2**64; None or -1: a fresh one for each request
    seed: int | None = None
    #: strings that end the output; one may be given bare
    stop: tuple[str, ...] = attrs.field(default=(), converter=_texts)
    #: token ids that end the output, beside the model's own
    stop_token_ids: tuple[int, ...] = attrs.field(default=(), converter=_sequence)
    include_stop_str_in_output: bool = False
    #: go on after the model's end-of-sequence tokens
    ignore_eos: bool = False
    #: most tokens of the output; None: up to the context
    max_tokens: int | None = 16
    #: no end-of-sequence token and no stop before this many tokens
    min_tokens: int = 0
    #: log-probabilities of this many likeliest tokens and of the chosen one; -1: all; None: none
    logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    #: token id -> value added to its logit, -100..100
    logit_bias: dict[int, float] | None = attrs.field(default=None, converter=_mapping_or_none)
    #: the only token ids that may be drawn
    allowed_token_ids: tuple[int, ...] | None = attrs.field(default=None, converter=_sequence_or_none)
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    #: most drafts a step: None is the engine's setting, False or 0 is off
    speculation: int | None = attrs.field(default=None, converter=_off_if_false)
    #: None or n: taking the best of more completions is not offered
    best_of: int | None = None
    #: as ``logprobs``, of the prompt's tokens; such a request does not read the prefix cache
    prompt_logprobs: int | None = None
    #: callables ``(output_ids, logits) -> logits`` or ``(prompt_ids, output_ids, logits) -> logits``,
    #: ``logits`` being ``[vocab]`` float32; applied in order
    logits_processors: tuple[Callable[..., Any], ...] | None = attrs.field(
        default=None, converter=_sequence_or_none
    )
    #: words the output must not hold
    bad_words: tuple[str, ...] | None = attrs.field(default=None, converter=_sequence_or_none)
    #: keep this many of the prompt's last tokens; -1: as many as the context holds
    truncate_prompt_tokens: int | None = None
    #: what the output keeps to: a JSON schema, a regular expression, a choice or a grammar
    structured_outputs: StructuredOutputsParams | None = attrs.field(default=None, converter=_structure)
    #: the old spelling of ``structured_outputs``
    guided_decoding: StructuredOutputsParams | None = attrs.field(default=None, converter=_guided)
    _frozen: bool = attrs.field(
        default=False, init=False, repr=False, eq=False, on_setattr=attrs.setters.NO_OP
    )

    if not TYPE_CHECKING:  # type checkers know the fields from attrs

        def __init__(self, **fields: Any) -> None:
            offered, faults = _offered(fields)
            try:
                self.__attrs_init__(**offered)
            except ConfigError as error:
                raise ConfigError(*faults, *error.faults) from None
            if faults:
                raise ConfigError(*faults)

    @classmethod
    def from_optional(cls, **fields: Any) -> SamplingParams:
        """With None for the default of each field but ``max_tokens``, where it means the context's end.

        ``logit_bias`` may have ids written as text, as JSON has them; values are cut to -100..100.
        """
        given = {name: value for name, value in fields.items() if value is not None or name == "max_tokens"}
        if isinstance(bias := given.get("logit_bias"), Mapping):
            given["logit_bias"] = {
                token: min(100.0, max(-100.0, value)) if _number(value) else value
                for token, value in bias_by_id(bias).items()
            }
        return cls(**given)

    def __attrs_post_init__(self) -> None:
        faults = [*self._number_faults(), *self._sequence_faults(), *self._combination_faults()]
        if faults:
            raise ConfigError(*faults)

    @property
    def greedy(self) -> bool:
        """Whether each token is the likeliest one, with no chance involved."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def structure(self) -> StructuredOutputsParams | None:
        """What the output keeps to, in whichever spelling it was asked for."""
        return self.structured_outputs or self.guided_decoding

    @property
    def is_snapshot(self) -> bool:
        """Whether assignments are refused."""
        return self._frozen

    def clone(self, **changes: Any) -> SamplingParams:
        """A copy, with ``changes`` applied and all checked."""
        return attrs.evolve(self, **changes)

    def snapshot(self) -> SamplingParams:
        """A checked copy that refuses assignments: what a request keeps while its owner goes on editing."""
        copy = attrs.evolve(self)
        copy._frozen = True
        return copy

    def check_vocab(self, vocab_size: int) -> None:
        """Refuse what names tokens outside a vocabulary of ``vocab_size`` ids.

        Raises:
            ConfigError: names each field and the ids at fault.
        """
        faults = []
        for field in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            if outside := [token for token in getattr(self, field) or () if token >= vocab_size]:
                ids = ", ".join(map(str, outside[:5])) + (", ..." if len(outside) > 5 else "")
                faults.append(f"{field} must hold token ids between 0 and {vocab_size - 1}, got {ids}")
        for field in ("logprobs", "prompt_logprobs"):
            if ((wish := getattr(self, field)) or 0) > vocab_size:
                faults.append(f"{field} must be at most the vocabulary size {vocab_size}, got {wish}")
        if faults:
            raise ConfigError(*faults)

    # -- checks ---------------------------------------------------------------------------------
    def _number_faults(self) -> list[str]:
        faults: list[str] = []

        def integer(name: str, low: int, high: int | None = None, *, optional: bool = False) -> None:
            value = getattr(self, name)
            if optional and value is None:
                return
            if not _integer(value) or value < low or (high is not None and value > high):
                bounds = f"at least {low}" if high is None else f"between {low} and {high}"
                none = " or None" if optional else ""
                faults.append(f"{name} must be an integer {bounds}{none}, got {value!r}")

        def number(name: str, low: float, high: float, *, above: bool = False) -> None:
            value = getattr(self, name)
            if not _number(value) or not low <= value <= high or (above and value == low):
                bounds = f"above {low:g} and at most {high:g}" if above else f"between {low:g} and {high:g}"
                faults.append(f"{name} must be a number {bounds}, got {value!r}")

        integer("n", 1, MAX_COMPLETIONS)
        number("presence_penalty", -2, 2)
        number("frequency_penalty", -2, 2)
        number("repetition_penalty", 0.01, 100)
        number("temperature", 0, 1e6)
        number("top_p", 0, 1, above=True)
        integer("top_k", -1)
        number("min_p", 0, 1)
        if self.seed is not None and not _integer(self.seed):
            faults.append(f"seed must be an integer or None, got {self.seed!r}")
        integer("max_tokens", 1, optional=True)
        integer("min_tokens", 0)
        integer("logprobs", -1, optional=True)
        integer("prompt_logprobs", -1, optional=True)
        integer("speculation", 0, optional=True)
        keep = self.truncate_prompt_tokens
        if keep is not None and (not _integer(keep) or keep < -1 or keep == 0):
            faults.append(f"truncate_prompt_tokens must be an integer at least 1, -1 or None, got {keep!r}")
        for name in (
            "include_stop_str_in_output",
            "ignore_eos",
            "detokenize",
            "skip_special_tokens",
            "spaces_between_special_tokens",
        ):
            if not isinstance(value := getattr(self, name), bool):
                faults.append(f"{name} must be True or False, got {value!r}")
        if not isinstance(self.output_kind, RequestOutputKind):
            faults.append(f"output_kind must be a RequestOutputKind, got {self.output_kind!r}")
        return faults

    def _sequence_faults(self) -> list[str]:
        faults = []
        if not isinstance(self.stop, tuple) or not all(isinstance(s, str) and s for s in self.stop):
            faults.append(
                f"stop must be a string or a list of strings, none of them empty, got {self.stop!r}"
            )
        for name in ("stop_token_ids", "allowed_token_ids"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, tuple) and all(_token(t) for t in value)):
                faults.append(f"{name} must be a list of token ids, integers from 0, got {value!r}")
        if self.allowed_token_ids == ():
            faults.append(
                "allowed_token_ids must name at least one token id, got an empty list; None allows all"
            )
        words = self.bad_words or ()
        if not isinstance(words, tuple) or not all(isinstance(word, str) and word.strip() for word in words):
            faults.append(f"bad_words must be a list of strings, none of them blank, got {words!r}")
        faults += self._processor_faults()
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, dict):
                faults.append(f"logit_bias must map token ids to numbers, got {self.logit_bias!r}")
            else:
                for token, bias in self.logit_bias.items():
                    if not _token(token):
                        faults.append(
                            f"logit_bias must have token ids, integers from 0, as keys, got {token!r}"
                        )
                    elif not _number(bias) or not -100 <= bias <= 100:
                        faults.append(
                            f"logit_bias[{token}] must be a number between -100 and 100, got {bias!r}"
                        )
        return faults

    def _processor_faults(self) -> list[str]:
        processors = self.logits_processors or ()
        if not isinstance(processors, tuple):
            return [f"logits_processors must be a list of callables, got {processors!r}"]
        faults = []
        for place, processor in enumerate(processors):
            try:
                takes_prompt(processor)
            except TypeError as error:
                faults.append(f"logits_processors[{place}] {error}")
        return faults

    def _combination_faults(self) -> list[str]:
        faults = []
        least, most = self.min_tokens, self.max_tokens
        if most is not None and _integer(least) and _integer(most) and least > most >= 1:
            faults.append(f"min_tokens must be at most max_tokens={self.max_tokens}, got {self.min_tokens}")
        if self.stop and self.detokenize is False:
            faults.append("stop needs the text: set detokenize=True, or use stop_token_ids")
        if self.best_of is not None and self.best_of != self.n:
            faults.append(
                f"best_of is not supported beyond best_of=n={self.n}, got {self.best_of!r}: leave it out"
            )
        faults += self._structure_faults()
        return faults

    def _structure_faults(self) -> list[str]:
        for name, convert in ((FIELD, StructuredOutputsParams.of), ("guided_decoding", from_guided)):
            value = getattr(self, name)
            if not isinstance(value, StructuredOutputsParams | None):
                try:
                    convert(value)
                except ConfigError as error:
                    return list(error.faults)
        if self.structured_outputs is not None and self.guided_decoding is not None:
            return [f"guided_decoding is the old spelling of {FIELD}: keep one of them"]
        return []


_FIELDS = frozenset(field.name for field in attrs.fields(SamplingParams) if field.init)


def _offered(fields: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Those that are fields, and a fault for each other that asks for something."""
    known: dict[str, Any] = {}
    faults: list[str] = []
    for name, value in fields.items():
        if name in _FIELDS:
            known[name] = value
        elif name not in NOT_OFFERED:
            near = difflib.get_close_matches(name, [*_FIELDS, *NOT_OFFERED], n=1)
            remedy = f"did you mean {near[0]!r}?" if near else "docs/sampling.md lists them"
            faults.append(f"{name} is no sampling parameter; {remedy}")
        elif value is not None and value not in NOT_OFFERED[name][0]:
            faults.append(f"{name}={value!r} is refused: {NOT_OFFERED[name][1]}")
    return known, faults


def bias_by_id(bias: Mapping[Any, Any]) -> dict[int, Any]:
    """``bias`` with token ids as keys that are text in JSON.

    Raises:
        ConfigError: a key is no token id.
    """
    keys = [str(key) for key in bias]
    if wrong := [key for key in keys if not key.isascii() or not key.isdigit() or len(key) > 18]:
        raise ConfigError(f"logit_bias must have token ids as keys, got {wrong[0]!r}")
    return dict(zip(map(int, keys), bias.values(), strict=True))


def _token(value: Any) -> bool:
    return _integer(value) and value >= 0
