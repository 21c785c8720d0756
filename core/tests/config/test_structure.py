"""A mapping becomes an attrs class strictly, and all its faults are told at once."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Optional, Union

import attrs
import numpy as np
import pytest
from specdecode.config import fields_of, structure
from specdecode.contract import ConfigError, DraftModelFields, LengthFields, option, within


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@attrs.frozen(kw_only=True)
class Inner:
    x: int = option("a coordinate", validator=within(0))
    y: int = option("another", default=0)


@attrs.frozen(kw_only=True)
class Everything:
    integer: int = 1
    number: float = 1.0
    text: str = ""
    flag: bool = False
    literal: Literal["a", "b", 3] = "a"
    optional: int | None = None
    old_optional: Optional[int] = None  # noqa: UP045
    either: Union[int, str] = 0  # noqa: UP007
    ids: list[int] = attrs.field(factory=list)
    paths: tuple[tuple[int, ...], ...] = ()
    pair: tuple[int, str] | None = None
    sequence: Sequence[float] = ()
    names: frozenset[str] = frozenset()
    table: dict[str, int] = attrs.field(factory=dict)
    open_table: Mapping[str, object] = attrs.field(factory=dict)
    anything: Any = None
    colour: Colour = Colour.RED
    inner: Inner | None = None
    inners: list[Inner] = attrs.field(factory=list)
    path: Path = Path()


def faults(cls, mapping, path="config", **options):
    with pytest.raises(ConfigError) as raised:
        structure(cls, mapping, path, **options)
    return raised.value.faults


ACCEPTED = [
    ("integer", 3, 3),
    ("integer", np.int64(3), 3),
    ("number", 2, 2.0),
    ("number", 2.5, 2.5),
    ("text", "x", "x"),
    ("flag", True, True),
    ("literal", "b", "b"),
    ("literal", 3, 3),
    ("optional", None, None),
    ("optional", 3, 3),
    ("old_optional", 3, 3),
    ("either", 3, 3),
    ("either", "3", "3"),
    ("ids", [1, 2], [1, 2]),
    ("ids", (1, 2), [1, 2]),
    ("paths", [[0], [0, 1]], ((0,), (0, 1))),
    ("pair", [1, "a"], (1, "a")),
    ("sequence", [1, 2.5], (1.0, 2.5)),
    ("names", ["a", "b", "a"], frozenset("ab")),
    ("names", {"a"}, frozenset("a")),
    ("table", {"a": 1}, {"a": 1}),
    ("open_table", {"a": [1]}, {"a": [1]}),
    ("anything", object, object),
    ("colour", "blue", Colour.BLUE),
    ("colour", Colour.BLUE, Colour.BLUE),
    ("inner", {"x": 1}, Inner(x=1)),
    ("inner", Inner(x=1), Inner(x=1)),
    ("inners", [{"x": 1}, {"x": 2, "y": 3}], [Inner(x=1), Inner(x=2, y=3)]),
    ("path", "a/b", Path("a/b")),
]


@pytest.mark.parametrize(("key", "given", "value"), ACCEPTED)
def test_accepted_values(key, given, value):
    result = getattr(structure(Everything, {key: given}, "config"), key)
    assert result == value
    assert type(result) is type(value)


REFUSED = [
    ("integer", "3", "config.integer must be an integer, got '3'"),
    ("integer", 2.5, "config.integer must be an integer, got 2.5"),
    ("integer", 2.0, "config.integer must be an integer, got 2.0"),
    ("integer", True, "config.integer must be an integer, got True"),
    ("integer", None, "config.integer must be an integer, got None"),
    ("number", "1", "config.number must be a number, got '1'"),
    ("number", False, "config.number must be a number, got False"),
    ("number", math.nan, "config.number must be a finite number, got nan"),
    ("text", 3, "config.text must be a string, got 3"),
    ("flag", 1, "config.flag must be true or false, got 1"),
    ("flag", "true", "config.flag must be true or false, got 'true'"),
    ("literal", "c", "config.literal must be one of 'a', 'b', 3, got 'c'"),
    ("literal", 3.0, "config.literal must be one of 'a', 'b', 3, got 3.0"),
    ("optional", "3", "config.optional must be an integer or None, got '3'"),
    ("old_optional", True, "config.old_optional must be an integer or None, got True"),
    ("either", 2.5, "config.either must be an integer or a string, got 2.5"),
    ("ids", 3, "config.ids must be a list, got 3"),
    ("ids", "12", "config.ids must be a list, got '12'"),
    ("ids", {1, 2}, "config.ids must be a list, got {1, 2}"),
    ("ids", [1, "2"], "config.ids[1] must be an integer, got '2'"),
    ("paths", [[0], [0, True]], "config.paths[1][1] must be an integer, got True"),
    ("pair", [1], "config.pair must be a list or None, got [1]"),
    ("names", "ab", "config.names must be a list, got 'ab'"),
    ("table", [1], "config.table must be a mapping, got [1]"),
    ("table", {"a": "1"}, "config.table['a'] must be an integer, got '1'"),
    ("colour", "green", "config.colour must be one of 'red', 'blue', got 'green'"),
    ("inner", 3, "config.inner must be a mapping or None, got 3"),
    ("inner", {"x": -1}, "config.inner.x must be at least 0, got -1"),
    ("inner", {"x": 1, "z": 2}, "config.inner.z is not a known key; known keys: x, y"),
    ("inners", [{"x": 1}, {}], "config.inners[1].x is required: a coordinate"),
    ("path", 3, "config.path must be pathlib.Path, got 3"),
]


@pytest.mark.parametrize(("key", "given", "message"), REFUSED)
def test_refused_values(key, given, message):
    (fault,) = faults(Everything, {key: given})
    assert fault.startswith(message)


def test_a_long_value_is_cut():
    (fault,) = faults(Everything, {"integer": "x" * 1000})
    assert len(fault) < 140
    assert fault.endswith("...")


@pytest.mark.parametrize("value", [0, -1, 10**6, "3", 2.5, True])
def test_the_bounds_of_a_shared_key(value):
    (fault,) = faults(LengthFields, {"num_speculative_tokens": value}, "speculative_config")
    assert fault.startswith("speculative_config.num_speculative_tokens must be ")
    assert f"got {value!r}" in fault and "1024" in fault
    if type(value) is int:
        assert fault == f"speculative_config.num_speculative_tokens must be between 1 and 1024, got {value}"


def test_unknown_keys_get_the_nearest_name():
    (fault,) = faults(Inner, {"x": 1, "yy": 2})
    assert fault == "config.yy is not a known key; did you mean 'y'?"
    (fault,) = faults(Inner, {"x": 1, "adaptve": True}, neighbours=["adaptive"])
    assert fault == "config.adaptve is not a known key; did you mean 'adaptive'?"
    (fault,) = faults(Inner, {"x": 1, 3: True})
    assert fault == "config[3]: keys are strings"
    assert faults(Inner, {"x": 1, "quite_other": 2}) == (
        "config.quite_other is not a known key; known keys: x, y",
    )


def test_no_mapping_at_all():
    assert faults(Inner, 3) == ("config must be a mapping, got 3",)


# -- validators ----------------------------------------------------------------------------------------
@attrs.frozen(kw_only=True)
class Window(LengthFields):
    longest: int = option("most", default=5, validator=within(1))
    shortest: int = option("fewest", default=1, validator=within(1))

    @shortest.validator
    def _not_above(self, attribute, value):
        if value > self.longest:
            raise ValueError(f"must be at most longest ({self.longest}), got {value}")


def test_all_faults_at_once():
    given = {"longest": 0, "shortest": "1", "shortset": 2}
    assert set(faults(Window, given)) == {
        "config.num_speculative_tokens is required: draft tokens proposed a step, 1 to 1024",
        "config.longest must be at least 1, got 0",
        "config.shortest must be an integer, got '1' (fewest)",
        "config.shortset is not a known key; did you mean 'shortest'?",
    }
    with pytest.raises(ConfigError) as raised:
        structure(Window, given, "config")
    assert str(raised.value).count("\n- ") == 3
    assert isinstance(raised.value, ValueError)


def test_a_validator_that_reads_another_field():
    given = {"num_speculative_tokens": 2, "shortest": 6}
    assert faults(Window, given) == ("config.shortest must be at most longest (5), got 6",)
    # The other field is wrong itself: its own fault is told, and the comparison is not made.
    assert faults(Window, {**given, "longest": None}) == (
        "config.longest must be an integer, got None (most)",
    )
    assert structure(Window, {**given, "longest": 6}, "config").shortest == 6


def test_validators_of_attrs_and_of_the_whole_class():
    @attrs.frozen(kw_only=True)
    class Checked:
        low: int = attrs.field(default=0, validator=attrs.validators.ge(0))
        high: int = attrs.field(default=1, converter=abs)
        twice: int = attrs.field(default=attrs.Factory(lambda self: 2 * self.high, takes_self=True))

        def __attrs_post_init__(self):
            if self.low > self.high:
                raise ValueError(f"low must not exceed high, got {self.low} and {self.high}")

    assert faults(Checked, {"low": -1}) == ("config.low: 'low' must be >= 0: -1",)
    assert faults(Checked, {"low": 3, "high": -2}) == ("config: low must not exceed high, got 3 and 2",)
    assert structure(Checked, {"high": -2}, "config").twice == 4


def test_a_validator_that_is_itself_at_fault_is_not_hidden():
    @attrs.frozen(kw_only=True)
    class Faulty:
        x: int = attrs.field(default=0, validator=lambda self, attribute, value: self.nowhere)

    with pytest.raises(AttributeError, match="nowhere"):
        structure(Faulty, {}, "config")


def test_a_private_field_goes_by_its_public_name():
    @attrs.frozen(kw_only=True)
    class Private:
        _secret: int = 1
        derived: int = attrs.field(default=2, init=False)

    assert structure(Private, {"secret": 3}, "config") == Private(secret=3)
    assert faults(Private, {"_secret": 3}) == ("config._secret is not a known key; did you mean 'secret'?",)
    assert [field.name for field in fields_of(Private)] == ["secret"]


def test_converters_and_derived_defaults():
    @attrs.frozen(kw_only=True)
    class Derived:
        base: int
        offset: int = attrs.field(default=attrs.Factory(lambda self: self.base + 1, takes_self=True))
        name: str = attrs.field(
            default="x",
            converter=attrs.Converter(
                lambda value, self, field: value * self.base, takes_self=True, takes_field=True
            ),
        )
        level: str = attrs.field(default="3", converter=int)

    made = structure(Derived, {"base": 2}, "config")
    assert (made.offset, made.name, made.level) == (3, "xx", 3)
    # What derives from a field that is wrong is not made, and adds no fault.
    assert faults(Derived, {"base": "2"}) == ("config.base must be an integer, got '2'",)
    assert faults(Derived, {"base": 2, "level": "high"}) == (
        "config.level: invalid literal for int() with base 10: 'high'",
    )


# -- what users are shown ------------------------------------------------------------------------------
def test_fields_of_a_class():
    shown = {field.name: field for field in fields_of(Window)}
    assert (shown["num_speculative_tokens"].required, shown["longest"].required) == (True, False)
    assert (shown["longest"].type, shown["longest"].default, shown["longest"].doc) == ("int", 5, "most")
    draft = {field.name: field for field in fields_of(DraftModelFields)}
    assert draft["revision"].type == "str | None"
    assert draft["draft_sample_method"].type == "Literal['greedy', 'probabilistic']"
    everything = {field.name: field for field in fields_of(Everything)}
    assert everything["ids"].default == []
    assert everything["sequence"].type == "Sequence[float]"
