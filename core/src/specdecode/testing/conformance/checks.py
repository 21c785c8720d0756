"""What a check is, and the one list of them: each module of :mod:`.groups` adds a group of its own."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs

from ...contract import Needs

if TYPE_CHECKING:
    from .subject import Subject

#: The check itself. It raises :class:`Broken` or :class:`NotApplicable`; text that it returns is a warning,
#: a :class:`Note` is not.
Run = Callable[["Subject"], "str | None"]
#: Why a check does not apply to a proposer with these needs; empty: it does.
Applies = Callable[[Needs], str]


class Broken(AssertionError):
    """The proposer does not keep what the check is about; the message says what was seen."""


class NotApplicable(Exception):
    """There is nothing to check, for a reason that ``Needs`` do not tell."""


class Note(str):
    """What a check that passed has to tell."""


def always(needs: Needs) -> str:
    """Applies to every proposer."""
    return ""


@attrs.frozen(kw_only=True)
class Check:
    """One promise of the contract, and how it is tried."""

    id: str  #: stable: ``group.name``
    promise: str  #: quoted from the contract or its documentation
    run: Run = attrs.field(repr=False)
    applies: Applies = attrs.field(default=always, repr=False)
    api: int = 1  #: the first contract number that makes the promise

    @property
    def group(self) -> str:
        return self.id.partition(".")[0]


class Group:
    """The checks of one subject matter; a module of :mod:`.groups` holds one as ``GROUP``."""

    def __init__(self, name: str, order: int) -> None:
        """``order``: where it stands among the groups."""
        self.name = name
        self.order = order
        self.checks: list[Check] = []

    def check(
        self, name: str, promise: str, *, applies: Applies = always, api: int = 1
    ) -> Callable[[Run], Run]:
        """Add the decorated function as the check ``<group>.<name>``."""

        def add(run: Run) -> Run:
            self.checks.append(
                Check(id=f"{self.name}.{name}", promise=promise, run=run, applies=applies, api=api)
            )
            return run

        return add


@functools.cache
def all_checks() -> tuple[Check, ...]:
    """Every check, in the order in which they are run."""
    from . import groups

    found: list[Group] = [
        importlib.import_module(f"{groups.__name__}.{module.name}").GROUP
        for module in pkgutil.iter_modules(groups.__path__)
    ]
    return tuple(check for group in sorted(found, key=lambda g: g.order) for check in group.checks)
