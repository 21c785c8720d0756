"""What a proposer was told and gave, and the rules to check that by; ``scripted-recorder`` writes it down.

``speculative_config={"method": "scripted-recorder", "inner": {...}, "recording": "name"}`` records into
``recording("name")``. The record is of this process alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs

from ..contract import Commit, Drafts, RequestInfo, StepView
from .scripted.oracle import history_of


@attrs.frozen(kw_only=True)
class DraftRecord:
    """What was proposed for one row of one step."""

    request_id: str
    history: tuple[int, ...]
    prompt_len: int
    params: Any  #: the request's SamplingParams
    budget: int
    room: int
    ids: tuple[int, ...]  #: at most ``budget``
    parents: tuple[int, ...]


@attrs.frozen
class Event:
    """A lifecycle call about one request."""

    kind: str  #: "add", "resume", "commit", "preempt" or "finish"
    request_id: str
    token_ids: tuple[int, ...] = ()  #: of "add" and "resume" all ids, of "commit" the new ones


@attrs.define
class Recording:
    """Everything one or more recorders saw, in order."""

    drafts: list[DraftRecord] = attrs.field(factory=list)
    events: list[Event] = attrs.field(factory=list)
    lagging: int = 0  #: rows whose history held tokens that ``on_commit`` had not told yet
    failures: list[Exception] = attrs.field(factory=list)  #: what ``propose`` raised
    faults: list[str] = attrs.field(factory=list)  #: what core told that does not fit together
    prompt_lens: dict[str, int] = attrs.field(factory=dict)
    params: dict[str, Any] = attrs.field(factory=dict)
    _told: dict[str, list[int]] = attrs.field(factory=dict, init=False)

    def clear(self) -> None:
        """Forget all; only while no request is alive."""
        self.__init__()  # type: ignore[misc]

    @property
    def alive(self) -> list[str]:
        """Requests that were added and not finished."""
        return list(self.prompt_lens)

    # -- written by the recorder ----------------------------------------------------------------
    def added(self, request: RequestInfo) -> None:
        ids = tuple(request.token_ids)
        self.events.append(Event("resume" if request.resumed else "add", request.id, ids))
        self.prompt_lens[request.id] = request.prompt_len
        self.params[request.id] = request.params
        self._told[request.id] = list(ids)

    def committed(self, commit: Commit) -> None:
        self.events.append(Event("commit", commit.id, tuple(commit.token_ids)))
        self._told.get(commit.id, []).extend(commit.token_ids)

    def preempted(self, request_id: str) -> None:
        self.events.append(Event("preempt", request_id))

    def finished(self, request_id: str) -> None:
        self.events.append(Event("finish", request_id))
        for mapping in (self.prompt_lens, self.params, self._told):
            mapping.pop(request_id, None)

    def proposed(self, step: StepView, out: Drafts) -> None:
        lens, ids, parents = out.lens.tolist(), out.ids.tolist(), out.parents.tolist()
        budgets, rooms = step.budget.tolist(), step.room.tolist()
        for row, request_id in enumerate(step.request_ids):
            history = tuple(history_of(step, row))
            told = self._told[request_id]
            if list(history[: len(told)]) != told:
                self.faults.append(f"{request_id}: on_commit told {told}, the history is {list(history)}")
            self.lagging += len(told) < len(history)
            count = max(0, min(lens[row], budgets[row]))
            self.drafts.append(
                DraftRecord(
                    request_id=request_id,
                    history=history,
                    prompt_len=self.prompt_lens[request_id],
                    params=self.params[request_id],
                    budget=budgets[row],
                    room=rooms[row],
                    ids=tuple(ids[row][:count]),
                    parents=tuple(parents[row][:count]),
                )
            )


_RECORDINGS: dict[str, Recording] = {}


def recording(name: str) -> Recording:
    """The recording of that name; it begins when first asked for."""
    return _RECORDINGS.setdefault(name, Recording())


def check_lifecycle(events: Sequence[Event]) -> None:
    """Raise AssertionError unless every request's calls come in an order the contract allows."""
    running: set[str] = set()
    preempted: set[str] = set()
    finished: set[str] = set()
    for event in events:
        name = event.request_id
        if event.kind == "add":
            assert name not in running | preempted | finished, f"{name} was added twice, or its id used again"
            running.add(name)
        elif event.kind == "resume":
            assert name in preempted, f"{name} was resumed without a preemption"
            preempted.remove(name)
            running.add(name)
        elif event.kind == "preempt":
            assert name in running, f"{name} was preempted while not running"
            running.remove(name)
            preempted.add(name)
        elif event.kind == "finish":
            assert name in running | preempted, f"{name} finished twice, or without being added"
            running.discard(name)
            preempted.discard(name)
            finished.add(name)
        else:
            assert name in running | preempted, f"a commit reached {name} outside its life"
    alive = running | preempted
    assert not alive, f"never finished: {sorted(alive)}"


#: Compares a record with what a stateless drafter gives: ``(ids, parents)``.
Stateless = Callable[[DraftRecord], tuple[tuple[int, ...], tuple[int, ...]]]


def wrong_drafts(records: Sequence[DraftRecord], stateless: Stateless) -> list[str]:
    """Records that differ from the stateless reference, each as a line of text."""
    wrong = []
    for record in records:
        if not record.budget:
            continue
        ids, parents = stateless(record)
        if (ids, parents) != (record.ids, record.parents):
            wrong.append(
                f"{record.request_id} at {len(record.history)} tokens, budget {record.budget}, "
                f"room {record.room}: drafted {record.ids} on {record.parents}, "
                f"the reference {ids} on {parents}"
            )
    return wrong
