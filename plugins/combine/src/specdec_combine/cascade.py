"""The first method whose score is high enough drafts, row by row."""

from __future__ import annotations

import numpy as np
import torch
from specdecode.contract import Drafts, Probs, StepView
from specdecode.heads.stopping import all_drafted

from .buffers import Output, Rows, as_given
from .team import Combination, Team


class CascadeProposer(Combination):
    """Every child is fed; each is asked for the rows that its elders left.

    What decides is how many of a row's drafts its method expects to be accepted: the sum of their scores.
    Where laws are told and the row is sampled, scores may know what was drawn, and a choice by that would
    bend the law. There it is the law of the first draft that tells: its largest probability ``m``, carried
    on, lets ``m + m**2 + ...`` drafts expect.
    """

    def __init__(self, team: Team, min_score: float) -> None:
        super().__init__(team)
        self._min_score = min_score

    def propose(self, step: StepView, out: Drafts) -> None:
        given, output = step.budget, Output(out)
        left = torch.as_tensor(given).clone()
        spans = []
        for index in range(len(self._team)):
            nothing = all_drafted(left, 0)
            rows = self._team.ask(step, index, as_given(left, given))
            if nothing:  # it was fed, and nobody is left to choose it
                spans.append(torch.zeros_like(left))
                continue
            chosen = (left > 0) & (rows.lens > 0)
            if self._min_score and index < len(self._team) - 1:
                chosen = chosen & (self._expected(step, index, rows, left) >= self._min_score)
            output.take(rows, chosen)
            spans.append(torch.where(chosen, torch.minimum(rows.lens, left), 0))
            left = torch.where(chosen, 0, left)
        self._team.tally.proposed(step, torch.stack(spans, 1))

    def _expected(self, step: StepView, index: int, rows: Rows, budget: torch.Tensor) -> torch.Tensor:
        """``[B]``: how many drafts of child ``index`` are expected to be accepted."""
        scored = torch.where(rows.present(), rows.score, 0.0).sum(1)
        if rows.probs is None or self._team.needs.probs is not Probs.FULL:
            return scored
        most = rows.probs[:, 0].amax(-1)
        count = torch.minimum(budget, torch.as_tensor(step.room)).clamp(max=rows.width)
        powers = most[:, None] ** torch.arange(1, rows.width + 1, device=most.device)
        by_law = torch.where(torch.arange(rows.width, device=most.device) < count[:, None], powers, 0.0).sum(
            1
        )
        # A greedy row draws nothing. Laws are the host's to weigh: no such step is captured.
        greedy = torch.from_numpy(np.array([params.greedy for params in step.params], bool))
        return torch.where(greedy.to(most.device, non_blocking=True), scored, by_law)
