"""Compiling: what comes out, what is refused, what is kept."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from specdecode.contract import ConfigError
from specdecode.structured import GrammarCompiler, StructuredOutputsConfig, StructuredOutputsParams
from specdecode.structured.schema import close_objects, without_remarks

VOCAB, EOS = 300, 2


def follows(compiler, tokenizer, text: str, may_stop: bool = True, **fields) -> bool:
    """Whether ``text`` is a whole output."""
    state = compiler.start(StructuredOutputsParams(**fields), may_stop=may_stop)
    for token in tokenizer.encode(text, add_special_tokens=False):
        if state.mask is None or token not in state.mask:
            return False
        state.advance([token])
    return state.mask is None or EOS in state.mask


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CLOSED_BY_NAME = {"type": "object", "additionalProperties": False}
CLOSED = SCHEMA | {"additionalProperties": False}


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"json": CLOSED}, ['{"a":1}', '{ "a" : 1\n}'], ['{"b":1}', "[1]", '{"a":1,"b":2}', '{"a":1', "{}"]),
        ({"json": SCHEMA}, ['{"a":1,"b":2}'], []),
        ({"json": SCHEMA, "disable_additional_properties": True}, ['{"a":1}'], ['{"a":1,"b":2}']),
        ({"json": CLOSED, "disable_any_whitespace": True}, ['{"a":1}'], ['{"a": 1}', '{ "a":1}']),
        ({"json": CLOSED, "whitespace_pattern": " ?"}, ['{"a":1}', '{"a": 1}'], ['{"a":  1}', '{"a":\n1}']),
        ({"json": "true"}, ["1", "[]", '{"a":null}'], ["nul", "x"]),
        ({"json_object": True}, ["{}", '{"b":[1,{}]}'], ["[]", "1"]),
        ({"regex": "ab?[0-9]{2}"}, ["a12", "ab34"], ["a1", "a123", "b12"]),
        ({"regex": "^a.c$"}, ["abc", "aéc"], ["a\nc", "ac"]),
        ({"choice": ['a"b', "a\\n", "ä", "ab", "<|im_end|>"]}, ['a"b', "a\\n", "ä", "ab"], ["a", "a\n", "b"]),
        ({"grammar": 'root ::= "x" root "y" | "z"'}, ["z", "xxzyy"], ["xz", "xzyy"]),
        ({"grammar": 'start: "a" WORD "."\nWORD: /[b-d]+/'}, ["abc."], ["a.", "abc"]),
    ],
)  # fmt: skip
def test_what_a_grammar_allows(compiler, tokenizer, fields, good, bad):
    assert [text for text in good if not follows(compiler, tokenizer, text, **fields)] == []
    assert [text for text in bad if follows(compiler, tokenizer, text, **fields)] == []


@pytest.mark.parametrize(
    ("fields", "needles"),
    [
        ({"regex": "[0-9"}, ["structured_outputs.regex='[0-9'", "unclosed character class"]),
        ({"regex": "(?=a)b"}, ["look-around"]),
        ({"regex": "()"}, ["structured_outputs.regex='()'", "empty text"]),
        ({"json": {"type": "objekt"}}, ['structured_outputs.json={"type": "objekt"}', "objekt"]),
        ({"json": {"type": "array", "uniqueItems": True}}, ["uniqueItems"]),
        ({"json": {"$ref": "https://example.com/schema"}}, ["https://example.com/schema"]),
        ({"json": {"enum": []}}, ["structured_outputs.json", "nsatisfiable"]),
        ({"json": "{}", "whitespace_pattern": "["}, ["unclosed"]),
        ({"grammar": "start: foo"}, ["structured_outputs.grammar='start: foo'", "foo"]),
        ({"grammar": "root ::= ("}, ["structured_outputs.grammar", "Expected ')'"]),
    ],
)
def test_what_cannot_be_compiled_is_refused_by_name(compiler, fields, needles):
    with pytest.raises(ConfigError) as caught:
        compiler.check(StructuredOutputsParams(**fields))
    message = str(caught.value)
    assert isinstance(caught.value, ValueError) and "\n" not in message and "cannot be compiled" in message
    assert all(needle in message for needle in needles), message


def test_defaults_of_the_engine(tokenizer):
    config = StructuredOutputsConfig(disable_any_whitespace=True, disable_additional_properties=True)
    compiler = GrammarCompiler(tokenizer, VOCAB, [EOS], config)
    assert follows(compiler, tokenizer, '{"a":1}', json=SCHEMA)
    assert not follows(compiler, tokenizer, '{"a": 1}', json=SCHEMA)
    assert not follows(compiler, tokenizer, '{"a":1,"b":2}', json=SCHEMA)
    assert follows(compiler, tokenizer, '{"b":1}', json_object=True)
    assert follows(compiler, tokenizer, '{"a": 1}', json=SCHEMA, whitespace_pattern=" ")


LONG = "ab" * 40_000


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"regex": LONG}, "structured_outputs.regex has 80000 characters, and"),
        ({"regex": "|".join([LONG] * 2)}, "texts to choose from may be more as structured_outputs.choice"),
        ({"grammar": f'start: "{LONG}"'}, "structured_outputs.grammar has 80009 characters, and"),
        ({"choice": ["a", LONG]}, "structured_outputs.choice has a text of 80000 characters, and"),
        ({"json": {"const": LONG}}, "json has 80013 characters beside titles and descriptions, and"),
    ],
)
def test_what_would_hold_up_other_requests_is_refused_by_its_size(tokenizer, compiler, fields, says):
    params = StructuredOutputsParams(**fields)
    for take in (compiler.check, compiler.start):
        with pytest.raises(ConfigError) as caught:
            take(params)
        assert says in str(caught.value) and len(str(caught.value)) < 400
        assert "the engine's structured_outputs_config.max_size is 65536" in str(caught.value)
    GrammarCompiler(tokenizer, VOCAB, [EOS], StructuredOutputsConfig(max_size=10**6)).check(params)


def test_what_is_for_people_has_no_size(compiler, tokenizer):
    described = {"description": LONG, "title": LONG, "properties": {"title": {"$comment": LONG, "const": 1}}}
    fields = {"json": {**described, "required": ["title"], "additionalProperties": False}}
    assert follows(compiler, tokenizer, '{"title":1}', **fields)
    assert not follows(compiler, tokenizer, '{"title":2}', **fields)
    assert without_remarks({"enum": [{"title": "x"}], "title": "y"}) == {"enum": [{"title": "x"}]}


def test_any_number_of_texts_to_choose_from(compiler, tokenizer):
    texts = [f"{number:05d} {word}" for number in range(20_000) for word in ("one", "o")]
    for text in ("00000 o", "19999 one"):
        assert follows(compiler, tokenizer, text, choice=texts)
    for text in ("20000 o", "19999", "19999 on"):
        assert not follows(compiler, tokenizer, text, choice=texts)


def test_an_object_of_many_properties(compiler, tokenizer):
    names = [f"name{number}" for number in range(1000)]
    fields = {"json": {"properties": {name: {"type": "integer"} for name in names}} | CLOSED_BY_NAME}
    assert follows(compiler, tokenizer, '{"name0":1,"name7":2,"name999":3}', **fields)
    assert not follows(compiler, tokenizer, '{"name0":1,"name1000":2}', **fields)


def test_a_schema_that_is_nested_too_deeply(compiler):
    schema: dict = {}
    for _ in range(600):
        schema = {"not_known": schema}
    with pytest.raises(ConfigError, match=r"structured_outputs\.json"):
        compiler.check(StructuredOutputsParams(json=json.dumps(schema)))


def test_each_grammar_is_compiled_once(tokenizer, monkeypatch):
    compiler = GrammarCompiler(tokenizer, VOCAB, [EOS], StructuredOutputsConfig())
    for fields in ({"regex": "a+"}, {"regex": "b+"}, {"regex": "a+"}, {"choice": ["a+"]}, {"json": SCHEMA}):
        for _ in range(3):
            compiler.check(StructuredOutputsParams(**fields))
            compiler.start(StructuredOutputsParams(**fields))
    assert compiler._compiled.cache_info().misses == 4


@pytest.mark.parametrize(
    ("broken", "needles"),
    [(None, ["skip_tokenizer_init=True", "allowed_token_ids"]), (object(), ["fast tokenizer", "object"])],
)
def test_a_tokenizer_that_will_not_do(broken, needles):
    compiler = GrammarCompiler(broken, VOCAB, [EOS], StructuredOutputsConfig())
    with pytest.raises(ConfigError, match="structured_outputs") as caught:
        compiler.check(StructuredOutputsParams(regex="a"))
    assert all(needle in str(caught.value) for needle in needles)


def test_a_tokenizer_whose_tokens_are_words():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<eos>": 0, "a": 1}, "<eos>"))
    )
    compiler = GrammarCompiler(words, 2, [0], StructuredOutputsConfig())
    with pytest.raises(ConfigError, match="known as bytes"):
        compiler.check(StructuredOutputsParams(regex="a"))


@pytest.mark.parametrize("vocab_size", [280, 300, 301, 320])
def test_a_vocabulary_of_another_size_than_the_tokenizers(tokenizer, vocab_size):
    """The model's may be padded, or smaller; masks are as wide as the model's."""
    compiler = GrammarCompiler(tokenizer, vocab_size, [EOS], StructuredOutputsConfig())
    state = compiler.start(StructuredOutputsParams(regex="(.|\n)+"))
    allowed = state.mask.to_array(vocab_size).nonzero()[0]
    assert len(state.mask.bits) == -(-vocab_size // 8) and len(allowed) > 100 and allowed.max() < vocab_size
    assert follows(compiler, tokenizer, "ab", regex="ab")


def test_a_model_without_an_end_of_sequence_token(tokenizer):
    compiler = GrammarCompiler(tokenizer, 320, [], StructuredOutputsConfig())
    state = compiler.start(StructuredOutputsParams(regex="a+b?"))
    (a,), (b,) = (tokenizer.encode(text, add_special_tokens=False) for text in "ab")
    for _ in range(3):
        state.advance([a])
        assert state.mask.to_array(320).nonzero()[0].tolist() == [a, b]  # nothing ends it
    state.advance([b])
    assert state.end == 4 and state.mask is None


def test_objects_are_closed_wherever_they_are():
    inner = {"properties": {"properties": {"type": "object", "properties": {}}}}
    got = close_objects(
        {
            "$defs": {"x": inner},
            "anyOf": [inner, {"additionalProperties": True, "patternProperties": {}}],
            "enum": [{"properties": {}}],
            "properties": {"enum": {"type": "string"}, "items": {"items": inner}},
            "type": "object",
        }
    )
    closed = {
        "properties": {"properties": {"type": "object", "properties": {}, "additionalProperties": False}},
        "additionalProperties": False,
    }
    assert got == {
        "$defs": {"x": closed},
        "anyOf": [closed, {"additionalProperties": True, "patternProperties": {}}],
        "enum": [{"properties": {}}],
        "properties": {"enum": {"type": "string"}, "items": {"items": closed}},
        "type": "object",
        "additionalProperties": False,
    }


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"backend": "xgrammar"}, "must be 'auto' or 'guidance'"),
        ({"reasoning_parser": "deepseek_r1"}, "reasoning_parser must be '' in this version"),
        ({"disable_whitespace": True}, "disable_any_whitespace"),
        ({"max_size": 0}, "max_size must be at least 1, got 0"),
    ],
)
def test_a_bad_config_is_refused_by_name(fields, message):
    from specdecode import EngineArgs

    with pytest.raises(ConfigError, match=message) as caught:
        EngineArgs("x", structured_outputs_config=fields)
    assert "structured_outputs_config" in str(caught.value)
    assert EngineArgs("x", structured_outputs_config={"backend": "guidance"}).structured_outputs_config


def test_the_library_is_imported_by_the_first_request_that_asks():
    code = (
        "import sys, specdecode.structured, specdecode.api.engine\n"
        "from specdecode import SamplingParams\n"
        "SamplingParams(structured_outputs={'regex': 'a'})\n"
        "print('llguidance' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
