"""Learns which method pays, and has that one draft."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
from specdecode.contract import Commit, Drafts, RequestInfo, StepView

from .buffers import Output
from .learning import Learner
from .team import Combination, Team


class AutoProposer(Combination):
    """One arm a step: all children are fed, one is asked, or none.

    Tokens are those that ``on_commit`` tells. Seconds are those between two commits of steps in which no
    prompt was computed, which is what a user waits for: target, drafting and all else.
    """

    #: Seconds, of any beginning.
    clock: Callable[[], float] = staticmethod(time.perf_counter)

    def __init__(self, team: Team, learner: Learner) -> None:
        super().__init__(team)
        self._learner = learner
        self._namespaces: dict[str, str] = {}
        self._last: float | None = None  # when the step before was committed, if the next one can be timed

    # -- learning -------------------------------------------------------------------------------
    def on_add(self, request: RequestInfo) -> None:
        self._namespaces[request.id] = request.namespace
        self._last = None
        super().on_add(request)

    def on_commit(self, commits: Sequence[Commit]) -> None:
        decoded = [commit for commit in commits if not commit.prefill]
        for commit in decoded:
            if (namespace := self._namespaces.get(commit.id)) is not None:
                self._learner.committed(namespace, commit.accepted + 1)
        now = self.clock()
        if len(decoded) < len(commits) or not decoded:
            self._last = None
        else:
            if self._last is not None:
                self._learner.took(len(decoded), now - self._last)
            self._last = now
        super().on_commit(commits)

    def on_preempt(self, request_id: str) -> None:
        self._last = None
        super().on_preempt(request_id)

    def on_finish(self, request_id: str, reason: str) -> None:
        self._namespaces.pop(request_id, None)
        if not self._namespaces:
            self._last = None
        super().on_finish(request_id, reason)

    # -- drafting -------------------------------------------------------------------------------
    def propose(self, step: StepView, out: Drafts) -> None:
        arm = self._arm(step)
        output = Output(out)
        budget = torch.as_tensor(step.budget)
        spans = torch.zeros(len(budget), len(self._team), dtype=torch.int64, device=budget.device)
        for index in range(len(self._team)):
            rows = self._team.ask(step, index, None if index == arm else 0)
            if index == arm:
                lens = torch.minimum(rows.lens, budget)
                output.take(rows, lens > 0)
                spans[:, index] = lens
        self._team.tally.proposed(step, spans)

    def _arm(self, step: StepView) -> int:
        """Chosen anew if anybody may be drafted for."""
        if not step.width:
            return self._learner.plain
        rows = Counter(self._namespaces.get(request_id, "") for request_id in step.request_ids)
        return self._learner.choose(rows)

    def metrics(self) -> Mapping[str, float]:
        """Also of each arm, and of ``none``: steps it was chosen for, tokens a row and a second."""
        labels = [*(child.label for child in self._team.children), "none"]
        found = {"namespaces": float(self._learner.namespaces)}
        for label, steps, rate in zip(labels, self._learner.steps, self._learner.rates(), strict=True):
            found |= {f"{label}.chosen_steps": float(steps), f"{label}.tokens_per_second": rate}
        return {**super().metrics(), **found}
