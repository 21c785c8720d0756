"""Proposers that break the contract, each in one way; none may harm a request."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence

import torch

from ...contract import Commit, Drafts, Proposer, RequestInfo, StepView, TargetUpdate
from .config import FaultyConfig, FlakyConfig
from .oracle import Script, history_of, write_row
from .wrapping import WrappingProposer


class BrokenOnPurpose(Exception):
    """What a faulty proposer raises."""


class FaultyProposer(Proposer):
    """Drafts what an oracle drafts, then commits its fault."""

    def __init__(self, config: FaultyConfig, vocab_size: int) -> None:
        self._config = config
        self._script = Script(config.texts)
        self._vocab_size = vocab_size
        self._calls = 0
        self._kept: list[Drafts] = []

    def on_add(self, request: RequestInfo) -> None:
        self._scribble()
        self._break_in("on-add")

    def on_commit(self, commits: Sequence[Commit]) -> None:
        self._scribble()
        self._break_in("on-commit")

    def on_preempt(self, request_id: str) -> None:
        self._break_in("on-preempt")

    def on_finish(self, request_id: str, reason: str) -> None:
        self._break_in("on-finish")

    def on_target_updated(self, update: TargetUpdate) -> None:
        self._break_in("on-target-updated")

    def metrics(self) -> Mapping[str, float]:
        self._break_in("metrics")
        return {}

    def propose(self, step: StepView, out: Drafts) -> None:
        self._calls += 1
        fault = self._config.fault if self._calls % self._config.every == 0 else None
        if fault == "raises":
            raise BrokenOnPurpose("raised before drafting")
        if fault == "exits":
            sys.exit("exited before drafting")
        for row in range(len(step.request_ids)):
            count = min(int(step.budget[row]), int(step.room[row]))
            drafted = self._script.follow(history_of(step, row), count)
            write_row(out, row, drafted)
            if fault is not None and (drafted or fault in _WITHOUT_DRAFTS):
                _COMMIT.get(fault, _nothing)(self, step, out, row)

    def _break_in(self, method: str) -> None:
        if self._config.fault == f"raises-in-{method}":
            self._calls += 1
            if self._calls % self._config.every == 0:
                raise BrokenOnPurpose(f"raised in {method}")

    def _scribble(self) -> None:
        """Write into drafts that were handed over in an earlier step."""
        with torch.inference_mode():  # as they were made
            for drafts in self._kept:
                drafts.ids[:] = self._vocab_size - 1
                drafts.lens[:] = drafts.ids.shape[1]
                drafts.parents[:] = 0


# -- one function a fault --------------------------------------------------------------------------
def _nothing(proposer: FaultyProposer, step: StepView, out: Drafts, row: int) -> None:
    return None


def _raise_half_way(proposer: FaultyProposer, step: StepView, out: Drafts, row: int) -> None:
    raise BrokenOnPurpose("raised after a row was drafted")


def _replace_last_id(value: Callable[[int], int]) -> Callable[[FaultyProposer, StepView, Drafts, int], None]:
    def commit(proposer: FaultyProposer, step: StepView, out: Drafts, row: int) -> None:
        out.ids[row, int(out.lens[row]) - 1] = value(proposer._vocab_size)

    return commit


def _cycle(proposer: FaultyProposer, step: StepView, out: Drafts, row: int) -> None:
    for node in range(int(out.lens[row])):
        out.parents[row, node] = (node + 1) % int(out.lens[row])


def _late_parent(proposer: FaultyProposer, step: StepView, out: Drafts, row: int) -> None:
    out.parents[row, int(out.lens[row]) - 1] = int(out.lens[row])


def _below_root(proposer: FaultyProposer, step: StepView, out: Drafts, row: int) -> None:
    out.parents[row, int(out.lens[row]) - 1] = -2


def _too_many(proposer: FaultyProposer, step: StepView, out: Drafts, row: int) -> None:
    width = out.ids.shape[1]
    write_row(out, row, _padded(proposer, step, row, width))


def _more_than_width(proposer: FaultyProposer, step: StepView, out: Drafts, row: int) -> None:
    out.lens[row] = out.ids.shape[1] + 1000


def _negative_lens(proposer: FaultyProposer, step: StepView, out: Drafts, row: int) -> None:
    out.lens[row] = -3


def _past_room(proposer: FaultyProposer, step: StepView, out: Drafts, row: int) -> None:
    """As many levels as the budget, whatever max_tokens and the context leave."""
    write_row(out, row, _padded(proposer, step, row, int(step.budget[row])))


def _keep(proposer: FaultyProposer, step: StepView, out: Drafts, row: int) -> None:
    proposer._kept.append(out)


def _replace(proposer: FaultyProposer, step: StepView, out: Drafts, row: int) -> None:
    """An array of its own, of another shape and type, where core's buffer was."""
    out.ids = out.ids[:, :1] * 1.5


def _nan_scores(proposer: FaultyProposer, step: StepView, out: Drafts, row: int) -> None:
    out.score[row] = float("nan")


def _write_into_view(proposer: FaultyProposer, step: StepView, out: Drafts, row: int) -> None:
    """Scribble over what the view shows; a read-only array that refuses is as good as a copy."""
    for name in ("budget", "room", "committed_len", "last_token", "ids", "positions", "rows", "last"):
        try:
            getattr(step, name)[:] = 0
        except (ValueError, TypeError, RuntimeError):
            continue
    history = step.history[row]
    if isinstance(history, list):
        history.append(0)


def _padded(proposer: FaultyProposer, step: StepView, row: int, count: int) -> list[int]:
    ids = proposer._script.follow(history_of(step, row), count)
    return ids + [0] * (count - len(ids))


_COMMIT: dict[str, Callable[[FaultyProposer, StepView, Drafts, int], None]] = {
    "raises-half-way": _raise_half_way,
    "id-too-high": _replace_last_id(lambda vocab_size: vocab_size),
    "id-huge": _replace_last_id(lambda vocab_size: 2**40),
    "id-negative": _replace_last_id(lambda vocab_size: -1),
    "cyclic-parents": _cycle,
    "late-parent": _late_parent,
    "parent-below-root": _below_root,
    "too-many": _too_many,
    "more-than-width": _more_than_width,
    "negative-lens": _negative_lens,
    "past-room": _past_room,
    "keeps-buffers": _keep,
    "replaces-buffers": _replace,
    "nan-scores": _nan_scores,
    "writes-into-view": _write_into_view,
}

#: Committed on rows that may not draft as well.
_WITHOUT_DRAFTS = frozenset({"too-many", "more-than-width", "negative-lens", "past-room", "keeps-buffers"})


class FlakyProposer(WrappingProposer):
    """Another proposer, some of whose calls of ``propose`` raise."""

    def __init__(self, inner: Proposer, config: FlakyConfig) -> None:
        super().__init__(inner)
        self._config = config
        self._calls = 0

    def propose(self, step: StepView, out: Drafts) -> None:
        self._calls += 1
        chosen = self._config.calls
        fails = self._calls in chosen if chosen else self._calls % self._config.every == 0
        if fails and not self._config.after:
            raise BrokenOnPurpose("raised before the feed")
        super().propose(step, out)
        if fails:
            raise BrokenOnPurpose("raised after drafting")
