"""What may be asked for, how a bad wish is refused, and the old spelling."""

from __future__ import annotations

import logging

import pytest
import specdecode
from specdecode import GuidedDecodingParams, SamplingParams, StructuredOutputsParams
from specdecode.contract import ConfigError
from specdecode.structured import params as module

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.fixture(autouse=True)
def _nothing_was_warned_about():
    module._warn_once.cache_clear()


@pytest.mark.parametrize(
    ("fields", "faults"),
    [
        ({}, ["must name one of json, regex, choice, grammar, json_object, got none"]),
        ({"json_object": False}, ["got none"]),
        ({"regex": "a", "choice": ["b"]}, ["must name one of", "got regex, choice"]),
        ({"json": "{"}, ["structured_outputs.json", "'{'"]),
        ({"json": "[1]"}, ["structured_outputs.json must be a JSON schema", "[1]"]),
        ({"json": {"a": object}}, ["structured_outputs.json", "cannot hold"]),
        ({"json": 3}, ["structured_outputs.json", "got 3"]),
        ({"regex": ""}, ["structured_outputs.regex", "''"]),
        ({"regex": 3}, ["structured_outputs.regex", "got 3"]),
        ({"choice": []}, ["structured_outputs.choice", "()"]),
        ({"choice": "ab"}, ["structured_outputs.choice", "'ab'"]),
        ({"choice": ["a", ""]}, ["structured_outputs.choice", "none of them empty"]),
        ({"choice": ["a", 1]}, ["structured_outputs.choice", "1"]),
        ({"grammar": " "}, ["structured_outputs.grammar", "' '"]),
        ({"json_object": 1}, ["structured_outputs.json_object must be True or False, got 1"]),
        ({"structural_tag": "{}"}, ["structured_outputs.structural_tag is not built"]),
        (
            {"regex": "a", "disable_any_whitespace": 1},
            ["disable_any_whitespace must be True or False, got 1"],
        ),
        ({"regex": "a", "whitespace_pattern": " "}, ["whitespace_pattern=' '", "json and json_object only"]),
        ({"regex": "a", "disable_any_whitespace": True}, ["disable_any_whitespace=True", "leave it out"]),
        ({"json_object": True, "disable_additional_properties": True}, ["for json only"]),
        ({"json": "{}", "whitespace_pattern": ""}, ["whitespace_pattern", "''"]),
        (
            {"json": "{}", "whitespace_pattern": " ", "disable_any_whitespace": True},
            ["whitespace_pattern=' ' contradicts disable_any_whitespace=True"],
        ),
    ],
)
def test_a_bad_wish_is_refused_by_name(fields, faults):
    for make in (StructuredOutputsParams, GuidedDecodingParams):
        with pytest.raises(ConfigError) as caught:
            make(**fields)
        assert all(fault in str(caught.value) for fault in faults), str(caught.value)
    if fields:  # as a mapping, and together with what else is wrong
        with pytest.raises(ConfigError) as caught:
            SamplingParams(structured_outputs=fields, temperature=-1)
        assert all(fault in str(caught.value) for fault in [*faults, "temperature"])


@pytest.mark.parametrize("field", ["structured_outputs", "guided_decoding"])
@pytest.mark.parametrize(
    ("value", "needles"),
    [(7, ["must be", "7"]), ("[0-9]", ["must be", "'[0-9]'"]), ({"regexp": "a"}, ["regexp", "regex"])],
)
def test_what_is_no_structure_is_refused_by_name(field, value, needles):
    with pytest.raises(ConfigError, match=field) as caught:
        SamplingParams(**{field: value})
    assert all(needle in str(caught.value) for needle in needles)


@pytest.mark.parametrize(
    "fields",
    [
        {"json": SCHEMA}, {"json": "{}"}, {"json": "true"}, {"regex": " "}, {"choice": ("a",)},
        {"grammar": "root ::= 'a'"},
        {"json_object": True, "disable_fallback": True}, {"json": SCHEMA, "whitespace_pattern": " "},
        {"json": SCHEMA, "disable_additional_properties": True, "disable_any_whitespace": True},
    ],
)  # fmt: skip
def test_good_wishes(fields):
    made = StructuredOutputsParams(**fields)
    assert made.kind == next(iter(fields))
    params = SamplingParams(structured_outputs=fields)
    assert params.structured_outputs == params.structure == made
    assert params.clone(seed=3).snapshot().structured_outputs == made


def test_a_schema_is_kept_as_it_was_given():
    schema = {"type": "object", "properties": {}}
    made = StructuredOutputsParams(json=schema)
    schema["properties"]["a"] = {"type": "integer"}
    assert made.json == {"type": "object", "properties": {}}


def test_an_assignment_is_checked():
    params = SamplingParams()
    params.structured_outputs = {"regex": "a"}
    assert params.structure == StructuredOutputsParams(regex="a")
    with pytest.raises(ConfigError, match="regex"):
        params.structured_outputs = {"regex": 4}
    assert params.structure == StructuredOutputsParams(regex="a")
    with pytest.raises(AttributeError):
        params.structured_outputs.regex = "b"


def test_the_old_spelling_means_the_same_and_one_warning_says_what_to_write(caplog):
    old = GuidedDecodingParams(choice=["a", "b"], backend="outlines")
    for _ in range(2):
        params = SamplingParams(guided_decoding=old)
        assert params.clone(seed=1).structure == StructuredOutputsParams(choice=["a", "b"])
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    told = record.getMessage().split("write structured_outputs=")[1]
    assert eval(told, {"StructuredOutputsParams": StructuredOutputsParams}) == params.structure
    params.guided_decoding = {"regex": "a+", "backend": "xgrammar"}
    assert params.structure == StructuredOutputsParams(regex="a+")
    assert SamplingParams(structured_outputs=old).structure.choice == ("a", "b")


def test_both_spellings_at_once_are_refused():
    with pytest.raises(ConfigError, match="guided_decoding is the old spelling of structured_outputs"):
        SamplingParams(structured_outputs={"regex": "a"}, guided_decoding={"regex": "a"})


def test_names_are_where_scripts_import_them_from():
    from specdecode import sampling_params

    for name in ("SamplingParams", "StructuredOutputsParams", "GuidedDecodingParams", "RequestOutputKind"):
        assert getattr(sampling_params, name) is getattr(specdecode, name)
