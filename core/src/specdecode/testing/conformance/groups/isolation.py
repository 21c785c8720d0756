"""Whether a row's drafts depend on nothing but its own request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ....contract import Memory, Needs
from ..checks import Broken, Group
from ..comparing import differences

if TYPE_CHECKING:
    from ..asks import Ask
    from ..driving import Rig
    from ..subject import Subject

GROUP = Group("isolation", order=70)

#: Requests of the kit that are also run alone.
_ALONE = 4


@GROUP.check("neighbours", "never changes another request's output")
def neighbours(subject: Subject) -> str | None:
    """Each of some requests alone in an engine of its own, then all of them together, in another order."""
    asks = subject.toy.asks[:_ALONE]
    if subject.needs.memory is Memory.NAMESPACE:  # it may learn from its neighbours of one namespace
        asks = [ask.named(ask.key, namespace=ask.key) for ask in asks]
    alone = [row for ask in asks for row in subject.run([ask]).log.rows]
    together = subject.run(asks[::-1]).log.rows
    compared, found = differences(alone, together)
    if found:
        raise Broken(f"{len(found)} of {compared} drafts change beside other requests: {found[0]}")
    return None if compared else "no draft was made, so nothing was compared"


def _forgets(needs: Needs) -> str:
    return "" if needs.memory is Memory.REQUEST else "Needs.memory is NAMESPACE"


@GROUP.check("forgets-requests", "until the request ends", applies=_forgets)
def forgets_requests(subject: Subject) -> str | None:
    """The same requests again: nothing of their first life helps the second."""
    _compare_lives(subject, "", "")
    return None


def _remembers(needs: Needs) -> str:
    return "" if needs.memory is Memory.NAMESPACE else "Needs.memory is REQUEST"


@GROUP.check(
    "namespaces", "what is remembered across requests may be shown to this namespace only", applies=_remembers
)
def namespaces(subject: Subject) -> str | None:
    """The same requests again in another namespace: nothing of the first helps there."""
    _compare_lives(subject, "first", "second")
    return None


def _compare_lives(subject: Subject, first: str, second: str) -> None:
    asks = subject.toy.asks[:_ALONE]
    lives = [
        *(ask.named(f"{ask.key}-first", first) for ask in asks),
        *(ask.named(f"{ask.key}-second", second) for ask in asks),
    ]
    rows = subject.run(lives, drive=_one_by_one, enable_prefix_caching=False).log.rows
    before = [row for row in rows if "-first/" in row.request_id]
    after = [row for row in rows if "-second/" in row.request_id]
    compared, found = differences(before, after, same_name=lambda name: name.replace("-second", "-first"))
    if found:
        raise Broken(f"{len(found)} of {compared} drafts know an earlier request: {found[0]}")


def _one_by_one(rig: Rig, asks: Sequence[Ask]) -> dict[str, list[int]]:
    outputs: dict[str, list[int]] = {}
    for ask in asks:
        outputs |= rig.generate([ask])
    return outputs
