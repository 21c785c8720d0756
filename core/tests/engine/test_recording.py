"""The rules a recording is checked by."""

from __future__ import annotations

import pytest
from specdecode.contract import Commit, RequestInfo
from specdecode.testing.recording import (
    DraftRecord,
    Event,
    Recording,
    check_lifecycle,
    recording,
    wrong_drafts,
)


def events(text: str) -> list[Event]:
    """``"add a, commit a"`` as events."""
    return [Event(*word.split()) for word in text.split(", ")]


@pytest.mark.parametrize(
    "text",
    [
        "add a, commit a, finish a",
        "add a, finish a",
        "add a, preempt a, resume a, finish a",
        "add a, add b, preempt b, finish b, commit a, finish a",
        "add a, preempt a, commit a, finish a",
    ],
)
def test_legal_lives(text):
    check_lifecycle(events(text))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("add a", "never finished"),
        ("add a, finish a, finish a", "finished twice"),
        ("finish a", "without being added"),
        ("add a, add a, finish a", "added twice"),
        ("add a, finish a, add a, finish a", "used again"),
        ("add a, finish a, commit a", "outside its life"),
        ("commit a, add a, finish a", "outside its life"),
        ("add a, resume a, finish a", "without a preemption"),
        ("add a, preempt a, preempt a, finish a", "while not running"),
        ("add a, preempt a, add a, finish a", "added twice"),
    ],
)
def test_illegal_lives(text, fault):
    with pytest.raises(AssertionError, match=fault):
        check_lifecycle(events(text))


def test_state_of_a_recording():
    seen = Recording()
    seen.added(RequestInfo(id="a", namespace="", token_ids=(1, 2), prompt_len=2, params=None, resumed=False))
    seen.committed(Commit(id="a", token_ids=(3,), accepted=0, prefill=True))
    assert seen.alive == ["a"] and len(seen.events) == 2
    seen.finished("a")
    assert seen.alive == []


def test_recordings_are_kept_by_name():
    assert recording("one") is recording("one") is not recording("another")


def test_wrong_drafts_are_told():
    def record(ids, budget=2):
        parents = tuple(range(-1, len(ids) - 1))
        return DraftRecord(
            request_id="a",
            history=(1, 2),
            prompt_len=1,
            params=None,
            budget=budget,
            room=2,
            ids=ids,
            parents=parents,
        )

    stateless = lambda asked: ((5, 6), (-1, 0))  # noqa: E731
    assert wrong_drafts([record((5, 6)), record((), budget=0)], stateless) == []
    (line,) = wrong_drafts([record((5, 7))], stateless)
    assert "(5, 7)" in line and "(5, 6)" in line and "2 tokens" in line
