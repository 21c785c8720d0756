"""Requests of every kind of structure, engines for them, and what their outputs are compared with."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import pytest

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["ada", "bob", "al"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["x", "yy"]}, "maxItems": 3},
        "ok": {"type": ["boolean", "null"]},
    },
    "required": ["name", "age", "ok"],
    "additionalProperties": False,
}
CHOICES = ["apple pie", "apple", "banana", 'ap"p', "äpfel"]
DIGITS = r"[0-9]{3}(-[a-c]{2})?"
NESTED = 'root ::= "(" root ")" | [a-c]{2}'
LARK = """
start: sum ";"
sum: NUMBER | sum "+" NUMBER
NUMBER: /[1-9][0-9]?/
"""


def _nested(text: str) -> bool:
    while text.startswith("(") and text.endswith(")"):
        text = text[1:-1]
    return re.fullmatch("[a-c]{2}", text) is not None


def _follows(schema: Any, spaces: str = "") -> Callable[[str], bool]:
    def check(text: str) -> bool:
        import jsonschema

        value = json.loads(text)
        jsonschema.validate(value, schema)
        return set(re.sub(r'"[^"]*"', "", text)) & set(" \t\r\n") <= set(spaces)

    return check


@attrs.frozen
class Kind:
    """A structure, and whether a whole text keeps to it."""

    wish: Mapping[str, Any]
    valid: Callable[[str], Any]


KINDS: dict[str, Kind] = {
    "choice": Kind({"choice": CHOICES}, CHOICES.__contains__),
    "regex": Kind({"regex": DIGITS}, re.compile(DIGITS).fullmatch),
    "open-regex": Kind({"regex": "[a-c]+"}, re.compile("[a-c]+").fullmatch),
    "wide-regex": Kind({"regex": "[é-ü]{2}x?"}, re.compile("[é-ü]{2}x?").fullmatch),
    "json": Kind({"json": SCHEMA, "disable_any_whitespace": True}, _follows(SCHEMA)),
    "json-text": Kind({"json": json.dumps(SCHEMA), "whitespace_pattern": " ?"}, _follows(SCHEMA, " ")),
    "json-object": Kind({"json_object": True}, _follows({"type": "object"}, " \t\r\n")),
    "gbnf": Kind({"grammar": NESTED}, _nested),
    "lark": Kind({"grammar": LARK}, re.compile(r"[1-9][0-9]?(\+[1-9][0-9]?)*;").fullmatch),
}


class PlainGrammar:
    """What a grammar allows next, looked up from its beginning each time: no rollback, nothing kept."""

    def __init__(self, kind: Mapping[str, Any], tokenizer: Any, vocab_size: int, eos: int) -> None:
        from llguidance import LLMatcher, grammar_from
        from llguidance.hf import from_tokenizer

        (what,) = {"json", "regex", "choice", "grammar", "json_object"} & set(kind)
        value = {"type": "object"} if what == "json_object" else kind[what]
        if "json" in what:
            options: dict[str, Any] = {}
            if kind.get("disable_any_whitespace"):
                options["whitespace_flexible"] = False
            if "whitespace_pattern" in kind:
                options["whitespace_pattern"] = kind["whitespace_pattern"]
            text = LLMatcher.grammar_from_json_schema(value, overrides=options)
        else:
            text = grammar_from(what, json.dumps(value) if what == "choice" else value)
        self._vocabulary = from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=[eos])
        self._text, self._vocab_size, self._eos = text, vocab_size, eos

    def __call__(self, output: Sequence[int]) -> set[int]:
        """The ids that may come after ``output``; none if it is complete."""
        from llguidance import LLMatcher

        matcher = LLMatcher(self._vocabulary, self._text, log_level=0)
        assert matcher.consume_tokens(list(output)) or not output
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        ids = set(np.unpackbits(bits, bitorder="little")[: self._vocab_size].nonzero()[0].tolist())
        return set() if ids == {self._eos} else ids


class StructuredLab:
    """Engines with the tokenizer of the ``lab``'s target, whose tokens are bytes."""

    EOS = 2

    def __init__(self, lab: Any) -> None:
        from specdecode.models import load_tokenizer, resolve_model

        self.lab = lab
        self.tokenizer = load_tokenizer(resolve_model(str(lab.target)))
        self._rigs: dict[str, Any] = {}
        self._alone: dict[str, Any] = {}

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def ask(self, structure: Mapping[str, Any] | None, prompt: str = "", **params: Any) -> Any:
        """A request; its prompt shows what ngram may look up."""
        from specdecode import StructuredOutputsParams

        shown = ' apple pie; {"name":"ada","age":12,"tags":["x","yy"],"ok":true} ((ab)) 123-ab 1+2+3; ab'
        wish = None if structure is None else StructuredOutputsParams(**structure)
        defaults = {"max_tokens": 30, "temperature": 0.0}
        return self.lab.ask(self.encode(prompt + shown), structured_outputs=wish, **(defaults | params))

    def asks(self) -> list[Any]:
        """Every kind, greedy and seeded, between requests without structure."""
        found = []
        for place, kind in enumerate(KINDS.values()):
            prompt = f"{'p' * place}:"
            found.append(self.ask(kind.wish, prompt))
            found.append(self.ask(kind.wish, prompt, temperature=1.0, seed=place))
            if place % 3 == 0:
                found.append(self.ask(None, prompt, temperature=0.8, seed=place))
        found.append(self.ask(KINDS["json"].wish, "n", temperature=1.0, seed=3, n=3))
        found.append(self.ask(KINDS["regex"].wish, "n", temperature=1.0, seed=4, repetition_penalty=1.5))
        found.append(self.ask(KINDS["lark"].wish, "n", temperature=0.9, seed=5, top_k=3, min_p=0.02))
        return found

    def rig(self, drafter: str, asks: Sequence[Any] = (), **engine: Any) -> Any:
        """An engine, kept; its drafter knows the answers to ``asks``, and goes on behind their ends."""
        key = repr((drafter, len(asks), sorted(engine.items())))
        if key not in self._rigs:
            config = self.lab.config(drafter, self.texts(asks))
            defaults = {"num_gpu_blocks_override": 1200, "max_num_seqs": 32, "recorded": False}
            self._rigs[key] = self.lab.rig(config, **(defaults | engine), skip_tokenizer_init=False)
        return self._rigs[key]

    def run(self, rig: Any, asks: Sequence[Any]) -> list[Any]:
        prompts = [{"prompt_token_ids": ask.prompt} for ask in asks]
        return rig.llm.generate(prompts, [ask.params for ask in asks], use_tqdm=False)

    def alone(self, ask: Any) -> Any:
        """The output without speculation or company."""
        key = repr((ask.prompt, ask.params))
        if key not in self._alone:
            (self._alone[key],) = self.run(self.rig("none"), [ask])
        return self._alone[key]

    def texts(self, asks: Sequence[Any]) -> list[list[int]]:
        """Prompts and outputs, each with text past its end."""
        return [
            [*ask.prompt, *completion.token_ids, *self.encode('}] ap123)"')]
            for ask in asks
            for completion in self.alone(ask).outputs
        ]

    def grammar(self, wish: Mapping[str, Any]) -> PlainGrammar:
        return PlainGrammar(wish, self.tokenizer, 300, self.EOS)

    def close(self) -> None:
        for rig in self._rigs.values():
            try:
                rig.check()
            finally:
                rig.llm.shutdown()


@pytest.fixture(scope="session")
def structured(lab: Any) -> Iterator[StructuredLab]:
    found = StructuredLab(lab)
    yield found
    found.close()


@pytest.fixture(scope="session")
def kinds() -> dict[str, Kind]:
    """Name -> structure, for test files, which cannot import this one."""
    return KINDS
