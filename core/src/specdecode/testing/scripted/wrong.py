"""Proposers that break a promise which the output does not show: the conformance kit must see each.

All draft right tokens, and each does one thing that the contract forbids. Those that break what core
itself catches are in :mod:`.faulty`, draft models in :mod:`.wrong_models`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...contract import EMBED, Commit, Drafts, Proposer, RequestInfo, StepView, TargetHandle
from .config import WrongConfig
from .faulty import BrokenOnPurpose
from .oracle import Script, history_of, write_row
from .wrong_models import DRAFT_MODELS, Missed


class WrongProposer(Proposer):
    """An oracle; a subclass does what it must not."""

    def __init__(self, config: WrongConfig) -> None:
        self._script = Script(config.texts)

    def propose(self, step: StepView, out: Drafts) -> None:
        self.draft(step, out, self.histories(step))

    def histories(self, step: StepView) -> Sequence[Sequence[int]]:
        """Whatever the rows' texts are taken from."""
        return [history_of(step, row) for row in range(len(step.history))]

    def draft(self, step: StepView, out: Drafts, histories: Sequence[Sequence[int]]) -> None:
        for row, history in enumerate(histories):
            count = min(int(step.budget[row]), int(step.room[row]))
            write_row(out, row, self._script.follow(history, count))


# -- drafts ----------------------------------------------------------------------------------------
class Waits(WrongProposer):
    """Works on the device, and asks it for numbers."""

    def draft(self, step: StepView, out: Drafts, histories: Sequence[Sequence[int]]) -> None:
        counts = step.budget.minimum(step.room).tolist()
        for row, history in enumerate(histories):
            write_row(out, row, self._script.follow(history, counts[row]))


class RebindsBuffers(WrongProposer):
    """Puts an array of its own where core's buffer was."""

    def propose(self, step: StepView, out: Drafts) -> None:
        super().propose(step, out)
        out.ids = np.array(out.ids)


class ReturnsDrafts(WrongProposer):
    """Gives its drafts back, and leaves core's buffers as they are."""

    def propose(self, step: StepView, out: Drafts) -> Any:
        counts = np.minimum(step.budget, step.room)
        histories = self.histories(step)
        return [self._script.follow(ids, int(n)) for ids, n in zip(histories, counts, strict=True)]


class KeepsBuffers(WrongProposer):
    """Goes on writing into the buffers of the step before."""

    _kept: Drafts | None = None

    def on_commit(self, commits: Sequence[Commit]) -> None:
        if self._kept is not None:
            self._kept.ids[:] = 3

    def propose(self, step: StepView, out: Drafts) -> None:
        super().propose(step, out)
        self._kept = out


class WritesIntoView(WrongProposer):
    """Uses an array of the view as scratch."""

    def propose(self, step: StepView, out: Drafts) -> None:
        super().propose(step, out)
        step.committed_len[:] += 1


class ExceedsBudget(WrongProposer):
    """Drafts a token more than the budget, where the buffers have room for it."""

    def draft(self, step: StepView, out: Drafts, histories: Sequence[Sequence[int]]) -> None:
        for row, history in enumerate(histories):
            count = min(int(step.budget[row]) + 1, out.ids.shape[1])
            write_row(out, row, self._script.follow(history, count))


class BendsChain(WrongProposer):
    """Declares a chain and hangs all drafts on the last token."""

    def propose(self, step: StepView, out: Drafts) -> None:
        super().propose(step, out)
        out.parents[:] = -1


# -- honesty ---------------------------------------------------------------------------------------
class ReadsUndeclared(WrongProposer):
    """Declares the new tokens and reads the history."""


class ReachesAround(WrongProposer):
    """Declares the new tokens and takes the history from behind the view."""

    def histories(self, step: StepView) -> Sequence[Sequence[int]]:
        source: Any = step._source
        return source.rows("history", step._needs.place)


class DeclaresTaps(WrongProposer):
    """Has core copy hidden states that it never looks at."""


# -- lifecycle -------------------------------------------------------------------------------------
class LeaksOnAbort(WrongProposer):
    """Forgets to forget the requests that are aborted."""

    def __init__(self, config: WrongConfig) -> None:
        super().__init__(config)
        self._known: dict[str, RequestInfo] = {}

    def on_add(self, request: RequestInfo) -> None:
        self._known[request.id] = request

    def on_finish(self, request_id: str, reason: str) -> None:
        if reason != "abort":
            del self._known[request_id]


class LeaksUnasked(WrongProposer):
    """Frees only what it has drafted for."""

    def __init__(self, config: WrongConfig) -> None:
        super().__init__(config)
        self._new: dict[str, RequestInfo] = {}

    def on_add(self, request: RequestInfo) -> None:
        self._new[request.id] = request

    def propose(self, step: StepView, out: Drafts) -> None:
        self._new.clear()
        super().propose(step, out)


class RefusesResumption(WrongProposer):
    """Takes a request that comes back for a new one with a used id."""

    def __init__(self, config: WrongConfig) -> None:
        super().__init__(config)
        self._known: set[str] = set()

    def on_add(self, request: RequestInfo) -> None:
        if request.id in self._known:
            raise BrokenOnPurpose(f"{request.id} is known already")
        self._known.add(request.id)

    def on_finish(self, request_id: str, reason: str) -> None:
        self._known.discard(request_id)


class ForgetsPreempted(WrongProposer):
    """Takes a preempted request for one that must come back: its end is a surprise."""

    def __init__(self, config: WrongConfig) -> None:
        super().__init__(config)
        self._known: set[str] = set()

    def on_add(self, request: RequestInfo) -> None:
        self._known.add(request.id)

    def on_preempt(self, request_id: str) -> None:
        self._known.remove(request_id)

    def on_finish(self, request_id: str, reason: str) -> None:
        self._known.remove(request_id)


class MisspellsAHook(WrongProposer):
    """Would learn, were it told."""

    def on_commits(self, commits: Sequence[Commit]) -> None:
        raise BrokenOnPurpose("never called")


class ClosesOnce(WrongProposer):
    """Cannot be closed again."""

    _open = True

    def close(self) -> None:
        if not self._open:
            raise BrokenOnPurpose("closed already")
        self._open = False


class TellsNan(WrongProposer):
    """Divides by the drafts it never counted."""

    def metrics(self) -> Mapping[str, float]:
        return {"hit_rate": float("nan")}


# -- isolation -------------------------------------------------------------------------------------
class PeeksAtNeighbours(WrongProposer):
    """Drafts for each row what the row before it would get."""

    def histories(self, step: StepView) -> Sequence[Sequence[int]]:
        return [step.history[row - 1] for row in range(len(step.history))]


class Remembers(WrongProposer):
    """Drafts only the texts that begin as a finished request did, of whatever namespace."""

    #: Tokens by which it knows a text again.
    _HEAD = 5

    def __init__(self, config: WrongConfig) -> None:
        super().__init__(config)
        self._heads: dict[str, tuple[int, ...]] = {}
        self._seen: set[tuple[int, ...]] = set()

    def on_add(self, request: RequestInfo) -> None:
        self._heads[request.id] = tuple(request.token_ids[: self._HEAD])

    def on_finish(self, request_id: str, reason: str) -> None:
        self._seen.add(self._heads.pop(request_id))

    def histories(self, step: StepView) -> Sequence[Sequence[int]]:
        return [row if tuple(row[: self._HEAD]) in self._seen else () for row in step.history]


# -- state -----------------------------------------------------------------------------------------
class DoublesResumed(WrongProposer):
    """Keeps a request's text through a preemption, and adds all of it again when the request comes back."""

    def __init__(self, config: WrongConfig) -> None:
        super().__init__(config)
        self._texts: dict[str, list[int]] = {}

    def on_add(self, request: RequestInfo) -> None:
        self._texts.setdefault(request.id, []).extend(request.token_ids)

    def on_commit(self, commits: Sequence[Commit]) -> None:
        for commit in commits:
            self._texts[commit.id].extend(commit.token_ids)

    def on_finish(self, request_id: str, reason: str) -> None:
        del self._texts[request_id]

    def propose(self, step: StepView, out: Drafts) -> None:
        for row, request_id in enumerate(step.request_ids):
            count, text = min(int(step.budget[row]), int(step.room[row])), self._texts[request_id]
            write_row(out, row, self._script.follow(text, count) or [text[-1]] * max(0, count))


# -- lossless --------------------------------------------------------------------------------------
class SpoilsTarget(WrongProposer):
    """Takes the borrowed embedding for its own."""

    def load(self, target: TargetHandle) -> None:
        weight = target.modules[EMBED].weight
        weight.copy_(weight.roll(1, 0))


# -- failure ---------------------------------------------------------------------------------------
class TakesOffence(WrongProposer):
    """Drafts no more once a step was not drafted for."""

    def __init__(self, config: WrongConfig) -> None:
        super().__init__(config)
        self._missed = Missed()
        self._offended = False

    def on_commit(self, commits: Sequence[Commit]) -> None:
        self._missed.committed()

    def propose(self, step: StepView, out: Drafts) -> None:
        self._offended |= self._missed.proposed()
        if not self._offended:
            super().propose(step, out)


class TakesRevenge(TakesOffence):
    """Spoils the target once a step was not drafted for."""

    def load(self, target: TargetHandle) -> None:
        self._weight = target.modules[EMBED].weight

    def propose(self, step: StepView, out: Drafts) -> None:
        super().propose(step, out)
        if self._offended:
            self._weight.copy_(self._weight.roll(1, 0))


ORACLES: dict[str, type[WrongProposer]] = {
    "waits": Waits,
    "rebinds-buffers": RebindsBuffers,
    "returns-drafts": ReturnsDrafts,
    "keeps-buffers": KeepsBuffers,
    "writes-into-view": WritesIntoView,
    "exceeds-budget": ExceedsBudget,
    "bends-chain": BendsChain,
    "reads-undeclared": ReadsUndeclared,
    "reaches-around": ReachesAround,
    "declares-taps": DeclaresTaps,
    "leaks-on-abort": LeaksOnAbort,
    "leaks-unasked": LeaksUnasked,
    "refuses-resumption": RefusesResumption,
    "forgets-preempted": ForgetsPreempted,
    "misspells-a-hook": MisspellsAHook,
    "closes-once": ClosesOnce,
    "tells-nan": TellsNan,
    "peeks-at-neighbours": PeeksAtNeighbours,
    "remembers": Remembers,
    "remembers-namespaces": Remembers,
    "doubles-resumed": DoublesResumed,
    "spoils-target": SpoilsTarget,
    "takes-offence": TakesOffence,
    "takes-revenge": TakesRevenge,
}


def build(config: WrongConfig, path: str) -> Proposer:
    """The proposer that commits ``config.fault``; ``path``: the target's checkpoint."""
    if config.fault in DRAFT_MODELS:
        return DRAFT_MODELS[config.fault](path)
    return ORACLES[config.fault](config)
