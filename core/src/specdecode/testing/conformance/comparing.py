"""Compares the drafts of two runs, request by request and history by history."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .probe import RowRecord


def name_of(request_id: str) -> str:
    """What a request was called when it was added: ``<name>/<completion>#<serial>``."""
    return request_id.rpartition("/")[0]


def differences(
    before: Iterable[RowRecord],
    after: Iterable[RowRecord],
    *,
    same_name: Callable[[str], str] = lambda name: name,
    alike: Callable[[RowRecord, RowRecord], bool] = lambda one, other: one.taken == other.taken,
) -> tuple[int, list[str]]:
    """How many drafts of ``after`` have a counterpart in ``before``, and those that differ, as text.

    Counterparts are drafts for the same request, history, budget and room.

    Args:
        same_name: name of a request in ``after`` -> its name in ``before``.
        alike: whether two counterparts agree.
    """
    known = {_place(row, name_of(row.request_id)): row for row in before if row.budget}
    compared, found = 0, []
    for row in after:
        other = known.get(_place(row, same_name(name_of(row.request_id))))
        if other is None or not row.budget:
            continue
        compared += 1
        if not alike(row, other):
            found.append(
                f"{name_of(row.request_id)} at {len(row.history)} tokens: {row.taken[0]} on {row.taken[1]}, "
                f"before {other.taken[0]} on {other.taken[1]}"
            )
    return compared, found


def _place(row: RowRecord, name: str) -> Any:
    return name, row.history, row.budget, row.room
