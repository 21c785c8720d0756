"""A proposer around the one under test: watches what it is given, what it does with it, and what it gives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from typing import Any

import attrs
import numpy as np
import torch

from ...contract import (
    Commit,
    Drafts,
    Needs,
    Place,
    Proposer,
    RequestInfo,
    Resources,
    StepView,
    TargetHandle,
    TargetUpdate,
    Tokens,
)
from ...contract.errors import FAULTS
from ...engine.feed import buffers_of, replaced
from ..scripted.wrapping import WrappingProposer
from .syncs import SyncWatch
from .watching import WatchedModules, WatchedSource

#: What draft KV holds before it is written, with alternating signs: large, but no NaN, since a mask
#: lets those through.
GARBAGE = 37.0


class Injected(Exception):
    """What the kit raises in a proposer's stead."""


@attrs.frozen(kw_only=True)
class Interference:
    """What the kit does to a proposer while it works; by default nothing.

    Calls of ``propose`` are counted from 1.
    """

    fails_before: Callable[[int], bool] = lambda call: False  #: calls that raise and never reach it
    fails_after: Callable[[int], bool] = lambda call: False  #: calls that raise when it has drafted
    hooks: Collection[str] = ()  #: hooks that raise once it has been told
    poison: bool = False  #: whether it is given garbage where it declared nothing
    syncs: bool = False  #: whether waits for the device are looked for


@attrs.frozen(kw_only=True)
class RowRecord:
    """One row of one call of ``propose``, as it was left."""

    call: int  #: of ``propose``, counted from 1
    request_id: str
    history: tuple[int, ...]
    params: Any
    budget: int
    room: int
    len: int  #: what the proposer wrote into ``lens``
    ids: tuple[int, ...]  #: the ``len`` nodes, so far as the buffers reach
    parents: tuple[int, ...]
    score: tuple[float, ...]
    resumed: bool  #: whether the request was preempted before
    probs: Any = None  #: ``[len, V]`` if Needs.probs is FULL

    @property
    def taken(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Ids and parents within the budget."""
        return self.ids[: max(0, self.budget)], self.parents[: max(0, self.budget)]


@attrs.define
class Log:
    """What the probe saw."""

    rows: list[RowRecord] = attrs.field(factory=list)
    calls: int = 0  #: of ``propose``
    preemptions: int = 0
    raised: list[tuple[str, BaseException]] = attrs.field(
        factory=list
    )  #: method, and what it raised of itself
    prompt_lens: dict[str, int] = attrs.field(factory=dict)
    resumed: set[str] = attrs.field(factory=set)  #: requests that came back from a preemption
    learns: bool = False  #: whether the proposer has an ``on_commit`` of its own
    reads: set[str] = attrs.field(factory=set)  #: what of the view and of the modules was read
    #: kind of a fault -> what was seen
    faults: dict[str, list[str]] = attrs.field(factory=lambda: defaultdict(list))

    @property
    def drafted(self) -> list[RowRecord]:
        return [row for row in self.rows if row.len]


class Probe(WrappingProposer):
    """Passes every call on, and writes down what is seen in ``log``."""

    def __init__(self, inner: Proposer, needs: Needs, log: Log, interference: Interference) -> None:
        super().__init__(inner)
        self.log = log
        self.log.learns = type(inner).on_commit is not Proposer.on_commit
        self._needs = needs
        self._interference = interference
        self._handed_over: tuple[Drafts, list[Any]] | None = None  #: the last drafts, and what they were

    # -- before the first step ------------------------------------------------------------------
    def load(self, target: TargetHandle) -> None:
        watched = attrs.evolve(target, modules=WatchedModules(target.modules, self.log.reads))  # type: ignore[misc]
        self.inner.load(watched)

    def bind(self, resources: Resources) -> None:
        """Fill draft KV with garbage first: only what was fed may be seen."""
        for layers in resources.kv:
            for cache in layers:
                for tensor in cache:
                    signs = torch.arange(tensor.numel(), device=tensor.device).remainder_(2).mul_(2).sub_(1)
                    tensor.copy_(signs.reshape(tensor.shape).to(tensor.dtype) * GARBAGE)
        self.inner.bind(resources)

    # -- hooks ----------------------------------------------------------------------------------
    def on_add(self, request: RequestInfo) -> None:
        self.log.prompt_lens[request.id] = request.prompt_len
        if request.resumed:
            self.log.resumed.add(request.id)
        if self._poisons_tokens:
            request = attrs.evolve(request, token_ids=(0,) * len(request.token_ids))
        self._tell("on_add", request)

    def on_commit(self, commits: Sequence[Commit]) -> None:
        if self._poisons_tokens:
            commits = [attrs.evolve(commit, token_ids=(0,) * len(commit.token_ids)) for commit in commits]
        self._tell("on_commit", commits)

    def on_preempt(self, request_id: str) -> None:
        self.log.preemptions += 1
        self._tell("on_preempt", request_id)

    def on_finish(self, request_id: str, reason: str) -> None:
        self._tell("on_finish", request_id, reason)

    def on_target_updated(self, update: TargetUpdate) -> None:
        self._tell("on_target_updated", update)

    @property
    def _poisons_tokens(self) -> bool:
        return self._interference.poison and self._needs.tokens is Tokens.NONE

    def _tell(self, hook: str, *arguments: Any) -> None:
        self._call(hook, *arguments)
        if hook in self._interference.hooks:
            raise Injected(f"raised by the kit in {hook}")

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self.inner, method)(*arguments)
        except FAULTS as error:
            self.log.raised.append((method, error))
            raise
        finally:
            self._look_at_old_drafts(method)

    # -- drafting -------------------------------------------------------------------------------
    def propose(self, step: StepView, out: Drafts) -> None:
        self.log.calls += 1
        call = self.log.calls
        if self._interference.fails_before(call):
            raise Injected("raised by the kit before the feed")
        source: Any = step._source
        watched: Any = WatchedSource(source, self._needs, self.log.reads, poison=self._interference.poison)
        if self._interference.poison:
            out.ids[:] = 1 + int(out.ids.shape[1])
            out.score[:] = 0.5
        buffers = buffers_of(out)
        watch = nullcontext()
        if self._interference.syncs and self._needs.place is Place.DEVICE:
            watch = SyncWatch(self.log.faults["waits"].append)  # type: ignore[assignment]
        with watch:
            given = self._call("propose", StepView(self._needs, watched), out)
        if given is not None and not _host(out.lens).any():
            self.log.faults["returned"].append(type(given).__name__)
        self.log.faults["view"] += watched.written()
        self.log.faults["rebound"] += replaced(out, buffers)
        self._record(source, out)
        self._handed_over = (out, _copies(out))
        if self._interference.fails_after(call):
            raise Injected("raised by the kit after drafting")

    def _look_at_old_drafts(self, method: str) -> None:
        """Did ``method`` write into drafts that were handed over before?"""
        if self._handed_over is None:
            return
        drafts, copies = self._handed_over
        if not all(map(_equal, _copies(drafts), copies)):
            self.log.faults["kept"].append(f"{method} wrote into the drafts of the step before")
            self._handed_over = (drafts, _copies(drafts))

    def _record(self, source: Any, out: Drafts) -> None:
        host = {name: source.rows(name, Place.HOST) for name in ("request_ids", "params", "history")}
        budgets, rooms = (
            source.limit(name, source.rows(name, Place.HOST), bound, Place.HOST)
            for name, bound in (("budget", self._needs.width), ("room", self._needs.depth))
        )
        lens, ids, parents, score = (_host(value) for value in (out.lens, out.ids, out.parents, out.score))
        for row, request_id in enumerate(host["request_ids"]):
            count = max(0, int(lens[row]))
            self.log.rows.append(
                RowRecord(
                    call=self.log.calls,
                    request_id=request_id,
                    history=tuple(host["history"][row]),
                    params=host["params"][row],
                    budget=int(budgets[row]),
                    room=int(rooms[row]),
                    len=int(lens[row]),
                    ids=tuple(ids[row, :count].tolist()),
                    parents=tuple(parents[row, :count].tolist()),
                    score=tuple(score[row, :count].tolist()),
                    resumed=request_id in self.log.resumed,
                    probs=None if out.probs is None else _host(out.probs)[row, :count].copy(),
                )
            )


def _host(value: Any) -> np.ndarray:
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


def _copies(drafts: Drafts) -> list[Any]:
    return [np.array(_host(value), copy=True) for value in (drafts.ids, drafts.lens, drafts.parents)]


def _equal(one: np.ndarray, other: np.ndarray) -> bool:
    return one.shape == other.shape and bool((one == other).all())
