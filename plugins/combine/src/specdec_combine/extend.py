"""A method drafts, and others go on from where it ended."""

from __future__ import annotations

import torch
from specdecode.contract import Drafts, StepView

from .buffers import Output, as_given
from .team import Combination


class ExtendProposer(Combination):
    """The first child drafts a chain; the others are shown it as if it were committed, and lengthen it."""

    def propose(self, step: StepView, out: Drafts) -> None:
        given, output = step.budget, Output(out)
        budget = torch.as_tensor(given)
        most = torch.minimum(budget, torch.as_tensor(step.room))
        ends = torch.zeros_like(budget)
        spans: list[torch.Tensor] = []
        for index, child in enumerate(self._team.children):
            if index:
                after = output.drafts(ends)
                rows = self._team.ask(
                    step, index, as_given(budget - ends, given), after=self._given(after, given)
                )
            else:
                rows = self._team.ask(step, index)
            count = torch.minimum(rows.lens, budget - ends)
            if child is not self._team.children[-1]:
                count = torch.minimum(count, most - ends)  # a chain, to be gone on from
            output.append(rows, ends, output.chance(ends))
            ends = ends + count.clamp(min=0)
            spans.append(count.clamp(min=0))
        torch.as_tensor(out.lens).copy_(ends)
        self._team.tally.proposed(step, torch.stack(spans, 1))

    @staticmethod
    def _given(drafts: Drafts, like: object) -> Drafts:
        drafts.ids, drafts.lens = as_given(drafts.ids, like), as_given(drafts.lens, like)
        return drafts
