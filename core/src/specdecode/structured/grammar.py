"""From what a request asks for to a grammar that can be followed; compiled once an engine."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import attrs

from specdecode.contract import ConfigError
from specdecode.sampling.mask import TokenMask

from .params import FIELD, StructuredOutputsConfig, StructuredOutputsParams
from .schema import close_objects, without_remarks
from .state import GrammarState, told
from .vocabulary import llguidance_tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

#: Ways to go on from one place that the library may follow: four for each property that an object may lack.
#: Its own bound, 2000, ends requests with objects of 500.
MAX_WAYS = 20_000

#: Grammars that an engine keeps.
CACHED = 256


@attrs.frozen
class Source:
    """What a grammar is compiled from."""

    kind: str
    text: str  #: as the user gave it; JSON of a choice or of a schema
    options: tuple[tuple[str, Any], ...] = ()  #: of JSON

    def check_size(self, most: int) -> None:
        """Raise ConfigError if more than ``most`` characters have to be held against each token."""
        texts = json.loads(self.text) if self.kind == "choice" else [self.text]
        size = max(map(len, texts))
        if size > most:
            longest = "a text of " if self.kind == "choice" else ""
            plain = " beside titles and descriptions" if self.kind == "json" else ""
            remedy = f"; texts to choose from may be more as {FIELD}.choice" if self.kind == "regex" else ""
            raise ConfigError(
                f"{FIELD}.{self.kind} has {longest}{size} characters{plain}, and the engine's "
                f"structured_outputs_config.max_size is {most}, since other requests wait while the tokens "
                f"that fit are looked up{remedy}"
            )


@attrs.frozen(eq=False)
class Compiled:
    """A grammar at its beginning."""

    matcher: LLMatcher  #: only to be copied
    first: TokenMask  #: what it allows


class GrammarCompiler:
    """Compiles the grammars of an engine's requests over its tokenizer; keeps the last :data:`CACHED`."""

    def __init__(
        self, tokenizer: Any, vocab_size: int, eos_ids: Iterable[int], config: StructuredOutputsConfig
    ) -> None:
        """
        Args:
            tokenizer: a transformers fast tokenizer, or None; it is read when the first grammar is compiled.
            vocab_size: the model's, which may be padded beyond the tokenizer's.
            eos_ids: the model's; empty if it has none.
        """
        self._vocab_size = vocab_size
        self._eos_ids = frozenset(token for token in eos_ids if token < vocab_size)
        self._config = config
        self._vocabulary = functools.cache(
            functools.partial(llguidance_tokenizer, tokenizer, vocab_size, self._eos_ids)
        )
        self._compiled = functools.lru_cache(CACHED)(self._compile)

    def check(self, params: StructuredOutputsParams) -> None:
        """Compile what ``params`` ask for.

        Raises:
            ConfigError: it cannot be compiled; names the field, the value and what is wrong with it.
        """
        self._compiled(self._source(params))

    def start(self, params: StructuredOutputsParams, *, may_stop: bool = True) -> GrammarState:
        """The beginning of the grammar, for one completion.

        Args:
            may_stop: see :class:`GrammarState`.

        Raises:
            ConfigError: as :meth:`check`.
        """
        return self._start(self._compiled(self._source(params)), may_stop and bool(self._eos_ids))

    def _start(self, compiled: Compiled, may_stop: bool) -> GrammarState:
        ends = [token for token in self._vocabulary().eos_tokens if token < self._vocab_size]
        return GrammarState(compiled.matcher, self._vocab_size, ends, may_stop=may_stop, first=compiled.first)

    def _source(self, params: StructuredOutputsParams) -> Source:
        kind, config = params.kind, self._config
        value = getattr(params, kind)
        if kind == "choice":
            return Source(kind, json.dumps(value))
        if kind not in ("json", "json_object"):
            return Source(kind, value)
        schema = {"type": "object"} if kind == "json_object" else value
        schema = json.loads(schema) if isinstance(schema, str) else schema
        schema = {} if schema is True else schema  # options want an object
        if params.disable_additional_properties or (kind == "json" and config.disable_additional_properties):
            schema = close_objects(schema)
        schema = without_remarks(schema)
        options: dict[str, Any] = {}
        if params.whitespace_pattern is not None:
            options["whitespace_pattern"] = params.whitespace_pattern
        elif params.disable_any_whitespace or config.disable_any_whitespace:
            options["whitespace_flexible"] = False
        return Source(kind, json.dumps(schema), tuple(options.items()))

    def _compile(self, source: Source) -> Compiled:
        from llguidance import LLMatcher, LLParserLimits

        source.check_size(self._config.max_size)
        vocabulary = self._vocabulary()
        try:
            limits = LLParserLimits(max_items_in_row=MAX_WAYS)
            matcher = LLMatcher(vocabulary, _grammar(source), log_level=0, limits=limits)
            error = matcher.get_error()
        except ValueError as refusal:  # of a GBNF that has no Lark
            error = str(refusal)
        if not error:
            compiled = Compiled(matcher, TokenMask.of(matcher.compute_bitmask(), self._vocab_size))
            start = self._start(compiled, may_stop=False)
            error = start.why_nothing(()) or (
                "nothing but an empty text matches it" if not start.mask else ""
            )
        if error:
            value = source.text if source.kind in ("json", "choice") else repr(source.text)
            raise ConfigError(f"{FIELD}.{source.kind}={value} cannot be compiled: {told(error)}")
        return compiled


def _grammar(source: Source) -> str:
    """In llguidance's own form."""
    from llguidance import LLMatcher, grammar_from

    if source.kind == "choice":
        texts = " | ".join(json.dumps(text) for text in json.loads(source.text))
        return LLMatcher.grammar_from_lark(f"start: TEXTS\nTEXTS: {texts}")  # a rule has fewer alternatives
    if source.kind == "regex":
        return LLMatcher.grammar_from_regex(source.text)
    if source.kind == "grammar":
        return grammar_from("grammar", source.text)
    options: Any = dict(source.options)
    return LLMatcher.grammar_from_json_schema(source.text, overrides=options)
