"""What a proposer writes into the buffers that core gives it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from ....contract import Needs, Place, Probs, Shape
from ..checks import Broken, Group

if TYPE_CHECKING:
    from ..probe import RowRecord
    from ..subject import Subject

GROUP = Group("drafts", order=40)

#: Most that probabilities may miss 1 by.
_SUM_ATOL = 1e-3


def _each(subject: Subject, wrong: Callable[[RowRecord], str | None]) -> str | None:
    """Raise for the first rows that are ``wrong``; warn if no row was drafted for."""
    rows = [row for scene in (subject.ordinary, subject.stress) for row in scene.log.drafted]
    found = [(row, text) for row in rows if (text := wrong(row))]
    if found:
        row, text = found[0]
        raise Broken(
            f"{len(found)} of {len(rows)} drafts; the first is of {row.request_id} at {len(row.history)} "
            f"tokens, budget {row.budget}, room {row.room}: {text}"
        )
    return None if rows else "no draft was made in any run, so nothing was seen"


@GROUP.check("in-vocabulary", "Ids are the target's.")
def in_vocabulary(subject: Subject) -> str | None:
    size = subject.toy.info.vocab_size

    def wrong(row: RowRecord) -> str | None:
        outside = [token for token in row.ids if not 0 <= token < size]
        return f"ids {outside} of a vocabulary of {size}" if outside else None

    return _each(subject, wrong)


@GROUP.check("within-budget", "drafts of each row, at most the row's ``budget``")
def within_budget(subject: Subject) -> str | None:
    def wrong(row: RowRecord) -> str | None:
        return None if 0 <= row.len <= row.budget else f"lens is {row.len}"

    return _each(subject, wrong)


@GROUP.check("within-room", "fill ``out`` within each row's budget and room")
def within_room(subject: Subject) -> str | None:
    def wrong(row: RowRecord) -> str | None:
        if not 0 <= row.len <= row.budget:
            return None  # drafts.within-budget is about those
        deepest = max(depths(row), default=0)
        return f"{deepest} levels" if deepest > row.room else None

    return _each(subject, wrong)


@GROUP.check("parents-ordered", "a parent comes before its child")
def parents_ordered(subject: Subject) -> str | None:
    def wrong(row: RowRecord) -> str | None:
        bad = [f"{parent} of {node}" for node, parent in enumerate(row.parents) if not -1 <= parent < node]
        return f"parents {', '.join(bad)}" if bad else None

    return _each(subject, wrong)


def _declares_chain(needs: Needs) -> str:
    return "" if needs.shape is Shape.CHAIN else "Needs.shape is TREE"


@GROUP.check("chain", "a chain has ``depth == width``", applies=_declares_chain)
def chain(subject: Subject) -> str | None:
    def wrong(row: RowRecord) -> str | None:
        expected = tuple(range(-1, len(row.parents) - 1))
        ordered = all(-1 <= parent < node for node, parent in enumerate(row.parents))
        return f"parents {row.parents}" if ordered and row.parents != expected else None

    return _each(subject, wrong)


@GROUP.check("scores", "float32 in 0..1: confidence, never used by verification")
def scores(subject: Subject) -> str | None:
    def wrong(row: RowRecord) -> str | None:
        bad = [score for score in row.score if not (math.isfinite(score) and 0 <= score <= 1)]
        return f"score {bad}" if bad else None

    return _each(subject, wrong)


def _gives_probs(needs: Needs) -> str:
    return "" if needs.probs is Probs.FULL else "Needs.probs is NONE"


@GROUP.check("probabilities", "a probability for each token of the target's vocabulary", applies=_gives_probs)
def probabilities(subject: Subject) -> str | None:
    def wrong(row: RowRecord) -> str | None:
        if row.probs is None:
            return "no probabilities"
        for node, (token, probs) in enumerate(zip(row.ids, row.probs, strict=False)):
            if not (probs >= 0).all() or abs(float(probs.sum()) - 1) > _SUM_ATOL:
                return f"those of node {node} sum to {float(probs.sum()):.4f}"
            if 0 <= token < len(probs) and not probs[token] > 0:
                return f"node {node} drafted {token}, to which it gives probability {float(probs[token])}"
        return None

    return _each(subject, wrong)


def _on_device(needs: Needs) -> str:
    return "" if needs.place is Place.DEVICE else "Needs.place is HOST"


@GROUP.check("place-honoured", "torch tensors, never a synchronisation", applies=_on_device)
def place_honoured(subject: Subject) -> str | None:
    _refuse(subject, "waits", "waits for the device")
    return None


@GROUP.check("buffers-written", "into the buffers core gives")
def buffers_written(subject: Subject) -> str | None:
    _refuse(subject, "rebound", "puts objects of its own in the place of Drafts'")
    _refuse(
        subject, "returned", "returns something and leaves the buffers empty, which is all that core reads"
    )
    return None


@GROUP.check("buffers-not-kept", "core owns and re-uses the buffers")
def buffers_not_kept(subject: Subject) -> str | None:
    _refuse(subject, "kept", "writes into drafts that it has handed over")
    return None


@GROUP.check("view-not-written", "What a view shows is read, never written.")
def view_not_written(subject: Subject) -> str | None:
    _refuse(subject, "view", "writes into what the view shows")
    return None


def _refuse(subject: Subject, kind: str, what: str) -> None:
    """Raise if the probe saw a fault of that kind."""
    seen = [text for scene in (subject.ordinary, subject.stress) for text in scene.log.faults[kind]]
    if seen:
        raise Broken(f"{what}, {len(seen)} times: {', '.join(dict.fromkeys(seen))}")


def depths(row: RowRecord) -> list[int]:
    """Level of each node up to the first whose parent does not come before it."""
    found: list[int] = []
    for node, parent in enumerate(row.parents):
        if not -1 <= parent < node:
            break
        found.append(1 if parent < 0 else found[parent] + 1)
    return found
