"""What is accepted as a value of each type, and how a refusal is told."""

from __future__ import annotations

import enum
import functools
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import attrs

from .fields import describe, is_union

if TYPE_CHECKING:
    from cattrs import Converter

Hook = Callable[[Any, Any], Any]

#: Where below the value, and what; the text starts with the space or colon that joins it to the path.
Fault = tuple[str, str]


class Invalid(Exception):
    """A value is refused, for one or more reasons."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults = tuple(faults)
        super().__init__(self.faults)

    @classmethod
    def expected(cls, hint: Any, value: Any) -> Invalid:
        return cls([("", f" must be {describe(hint)}, got {_shown(value)}")])

    def below(self, step: str) -> list[Fault]:
        return [(step + where, message) for where, message in self.faults]


def strict_converter(structure_class: Callable[[Any, type, Converter], Any]) -> Converter:
    """A converter that widens nothing but an integer given for a number, and raises :class:`Invalid`.

    Args:
        structure_class: makes an instance of an attrs class from a value: ``(value, class, converter)``.
    """
    from cattrs import Converter

    converter = Converter()
    for kind, hook in ((int, _integer), (float, _number), (str, _string), (bool, _boolean)):
        converter.register_structure_hook(kind, hook)
    converter.register_structure_hook_func(lambda hint: hint is object, lambda value, _: value)
    converter.register_structure_hook_func(_is_literal, _literal)
    for applies, build in (
        (_is_enum, _enum),
        (_is_array, _array),
        (_is_mapping, _mapping),
        (is_union, _union),
    ):
        converter.register_structure_hook_factory(applies, functools.partial(build, converter))
    converter.register_structure_hook_func(
        attrs.has, lambda value, cls: structure_class(value, cls, converter)
    )
    return converter


def _integer(value: Any, hint: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise Invalid.expected(hint, value)
    return int(value)


def _number(value: Any, hint: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise Invalid.expected(hint, value)
    if not math.isfinite(value):
        raise Invalid([("", f" must be a finite number, got {value!r}")])
    return float(value)


def _string(value: Any, hint: Any) -> str:
    if not isinstance(value, str):
        raise Invalid.expected(hint, value)
    return value


def _boolean(value: Any, hint: Any) -> bool:
    if not isinstance(value, bool):
        raise Invalid.expected(hint, value)
    return value


def _is_literal(hint: Any) -> bool:
    origin: Any = get_origin(hint)
    return origin is Literal


def _literal(value: Any, hint: Any) -> Any:
    for choice in get_args(hint):
        if type(value) is type(choice) and value == choice:
            return choice
    raise Invalid.expected(hint, value)


def _is_enum(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, enum.Enum)


def _enum(_: Converter, hint: Any) -> Hook:
    def hook(value: Any, __: Any) -> Any:
        if isinstance(value, hint):
            return value
        for member in hint:
            if type(value) is type(member.value) and value == member.value:
                return member
        raise Invalid.expected(hint, value)

    return hook


def _is_array(hint: Any) -> bool:
    base = get_origin(hint) or hint
    return isinstance(base, type) and base is not str and issubclass(base, (Sequence, AbstractSet))


def _array(converter: Converter, hint: Any) -> Hook:
    """Lists, tuples and sets of one kind of element, and tuples with one kind for each place."""
    base, args = get_origin(hint) or hint, get_args(hint)
    build = base if base in (list, tuple, set, frozenset) else tuple
    per_place = base is tuple and args and args[-1] is not Ellipsis

    def hook(value: Any, _: Any) -> Any:
        accepted = (list, tuple, AbstractSet) if issubclass(base, AbstractSet) else (list, tuple)
        if not isinstance(value, accepted):
            raise Invalid.expected(hint, value)
        if per_place and len(value) != len(args):
            raise Invalid([("", f" must have {len(args)} elements, got {len(value)}")])
        kinds = args if per_place else [args[0] if args else Any] * len(value)
        faults: list[Fault] = []
        elements: list[Any] = []
        for index, (element, kind) in enumerate(zip(value, kinds, strict=True)):
            try:
                elements.append(converter.structure(element, kind))
            except Invalid as invalid:
                faults += invalid.below(f"[{index}]")
        if faults:
            raise Invalid(faults)
        return build(elements)

    return hook


def _is_mapping(hint: Any) -> bool:
    base = get_origin(hint) or hint
    return isinstance(base, type) and issubclass(base, Mapping)


def _mapping(converter: Converter, hint: Any) -> Hook:
    key_kind, value_kind = get_args(hint) or (str, Any)

    def hook(value: Any, _: Any) -> Any:
        if not isinstance(value, Mapping):
            raise Invalid.expected(hint, value)
        faults: list[Fault] = []
        result: dict[Any, Any] = {}
        for key, element in value.items():
            try:
                result[converter.structure(key, key_kind)] = converter.structure(element, value_kind)
            except Invalid as invalid:
                faults += invalid.below(f"[{key!r}]")
        if faults:
            raise Invalid(faults)
        return result

    return hook


def _union(converter: Converter, hint: Any) -> Hook:
    members = [member for member in get_args(hint) if member is not type(None)]
    optional = len(members) < len(get_args(hint))

    def hook(value: Any, _: Any) -> Any:
        if value is None and optional:
            return None
        for member in members:
            try:
                return converter.structure(value, member)
            except Invalid as invalid:
                # A fault inside the only candidate tells more than that the whole does not fit.
                if len(members) == 1 and any(where for where, _ in invalid.faults):
                    raise
        raise Invalid.expected(hint, value)

    return hook


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
