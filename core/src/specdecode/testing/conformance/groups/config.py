"""The method's keys of ``speculative_config``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs

from ....config import fields_of, structure
from ....config.fields import attributes_of
from ....contract import ConfigError
from ..checks import Broken, Group

if TYPE_CHECKING:
    from ..subject import Subject

GROUP = Group("config", order=20)

_ROOT = "speculative_config"
_NOBODYS = "no_method_has_this_key"
#: Values that most keys must refuse, and every key must survive.
_ABSURD: tuple[Any, ...] = (
    "absurd",
    -1,
    0,
    2**70,
    -0.5,
    float("nan"),
    True,
    None,
    [],
    [[]],
    {},
    {"a": {}},
    object,
)


def _keys(subject: Subject) -> dict[str, Any]:
    """The keys of the case that are the method's own."""
    known = attributes_of(subject.spec.config)
    return {key: value for key, value in subject.config.items() if key in known}


def _refusal(subject: Subject, mapping: Mapping[str, Any]) -> tuple[str, ...]:
    """The faults found in ``mapping``; none if it is accepted."""
    try:
        structure(subject.spec.config, mapping, _ROOT)
    except ConfigError as error:
        return error.faults
    except Exception as error:
        raise Broken(f"{dict(mapping)!r} raises {type(error).__name__}: {error}") from error
    return ()


@GROUP.check("unknown-key-refused", "owns the method's keys of ``speculative_config``")
def unknown_key_refused(subject: Subject) -> str | None:
    faults = _refusal(subject, {**_keys(subject), _NOBODYS: 1})
    if not any(f"{_ROOT}.{_NOBODYS}" in fault for fault in faults):
        raise Broken(f"the key {_NOBODYS!r} is accepted")
    return None


@GROUP.check("faults-together", "every fault of the configuration at once")
def faults_together(subject: Subject) -> str | None:
    """Absurd values key by key, each beside an unknown key: accepted or refused, and nothing hidden."""
    for field in fields_of(subject.spec.config):
        for value in _ABSURD:
            faults = _refusal(subject, {**_keys(subject), field.name: value, _NOBODYS: 1})
            if not any(f"{_ROOT}.{_NOBODYS}" in fault for fault in faults):
                raise Broken(f"{field.name}={value!r} hides the unknown key beside it: {faults}")
    return None


@GROUP.check("round-trip", "A method's config class is a frozen, keyword-only attrs class.")
def round_trip(subject: Subject) -> str | None:
    """What was made of the keys makes an equal config again; workers get the mapping and resolve it anew."""
    made: Any = structure(subject.spec.config, _keys(subject), _ROOT)
    again: Any = structure(
        subject.spec.config,
        {key: getattr(made, a.name) for key, a in attributes_of(type(made)).items()},
        _ROOT,
    )
    if again != made:
        raise Broken(f"{made!r}, with all its values given, becomes {again!r}")
    return None


@GROUP.check("frozen", "A method's config class is a frozen, keyword-only attrs class.")
def frozen(subject: Subject) -> str | None:
    kind = subject.spec.config
    made: Any = structure(kind, _keys(subject), _ROOT)
    if positional := [a.name for a in attrs.fields(kind) if a.init and not a.kw_only]:
        raise Broken(f"{', '.join(positional)} can be given by position")
    for attribute in attrs.fields(kind):
        try:
            setattr(made, attribute.name, getattr(made, attribute.name))
        except attrs.exceptions.FrozenError:
            continue
        raise Broken(f"{attribute.name} can be changed once it is made")
    return None


@GROUP.check("documented", 'Each field carries its documentation in ``metadata["doc"]``')
def documented(subject: Subject) -> str | None:
    bare = [field.name for field in fields_of(subject.spec.config) if not field.doc.strip()]
    if bare:
        raise Broken(f"{', '.join(bare)} have no documentation: use specdecode.contract.option")
    return None
