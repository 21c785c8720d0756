"""Verification of a step: what each row gets of its drafts, and the target's token behind them."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from ..runner.runner import TargetOutput
from ..sampling.batch import SampleRow
from ..sampling.logprobs import RowLogprobs, gather_logprobs
from ..sampling.sampler import UNDRAWABLE
from ..verify.base import Rule, Verdict
from ..verify.synthetic import take
from .draws import NAN_LOGITS, LazyTargets, draw_targets, verification_rows, why_undrawable
from .output import DrawnTokens
from .plan import StepPlan
from .request import Request
from .weighing import WeighedRow, weigh

NOTHING = Verdict((), ())


@attrs.frozen(eq=False)
class RowOutcome:
    """What a step made of one row, before the stop conditions are looked at."""

    request: Request
    drawn: DrawnTokens
    drafted: int = 0  #: drafts that were verified
    nodes: Sequence[int] = ()  #: of them accepted, by their places
    scores: Sequence[float] = ()  #: of all of them, where they are kept
    offered: int | None = None  #: drafts that it might have had; None: as many as its budget was
    prefill: bool = False  #: part of the prompt was computed


class Verification:
    """Verifies steps by one rule."""

    def __init__(self, rule: Rule, vocab_size: int) -> None:
        self.rule = rule
        self._vocab_size = vocab_size

    @torch.inference_mode()
    def verify(self, plan: StepPlan, target: TargetOutput) -> tuple[list[Verdict], list[RowOutcome]]:
        """Decide each row's drafts, and draw the target's token behind those it keeps."""
        targets, verdicts = self._decide(plan, target)
        errors = _errors(plan, target, targets, verdicts)
        # A draft's NaN reaches the tokens computed beside it: ask again without drafts.
        again = [index for index, error in errors.items() if error == NAN_LOGITS and plan.rows[index].drafts]
        for index in errors:
            tokens = verdicts[index].tokens[:-1]
            verdicts[index] = NOTHING if index in again else attrs.evolve(verdicts[index], tokens=tokens)
        logprobs = _logprobs(plan, target, verdicts)
        for index in errors:  # nothing is raised from here on
            request = plan.rows[index].request
            if index in again:
                request.undrafted = True
            else:
                request.failed = True
        outcomes = [
            RowOutcome(
                row.request,
                DrawnTokens(
                    verdict.tokens,
                    len(verdict.accepted),
                    logprobs.get(index),
                    errors[index] if row.request.failed else None,
                ),
                drafted=len(row.drafts),
                nodes=verdict.accepted,
                scores=row.drafts.scores,
                offered=0 if row.prefill or row.new > 1 else None,  # nothing is drafted behind part of a text
                prefill=row.prefill,
            )
            for index, (row, verdict) in enumerate(zip(plan.rows, verdicts, strict=True))
        ]
        return verdicts, outcomes

    def _decide(self, plan: StepPlan, target: TargetOutput) -> tuple[list[Sequence[int]], list[Verdict]]:
        """What the target drew for each row, as far as it was asked, and what the row gets."""
        offsets = target.batch.logit_offsets
        draws: list[Sequence[SampleRow]] = [verification_rows(row) for row in plan.rows]
        weighed: dict[int, WeighedRow] = {}
        for index, (row, own) in enumerate(zip(plan.rows, draws, strict=True)):
            if self.rule.weigh is None or not (own and row.drafts) or row.request.params.greedy:
                continue
            logits = target.logits[offsets[index] : offsets[index] + len(own)]
            lazy = None if row.request.processors is None else LazyTargets(row.request, logits, own)
            weighed[index] = WeighedRow(row, own, logits, lazy)
            draws[index] = ()
        targets = draw_targets(plan, draws, target.logits, offsets, self._vocab_size)
        verdicts = self._compare(plan, targets)
        if weighed:
            decided = weigh(self.rule, [*weighed.values()])
            for (index, own_row), verdict in zip(weighed.items(), decided, strict=True):
                targets[index], verdicts[index] = own_row.lazy or (), verdict
        return targets, verdicts

    def _compare(self, plan: StepPlan, targets: Sequence[Sequence[int]]) -> list[Verdict]:
        """By the tokens the target drew; what was not drawn gets nothing."""
        if self.rule.synthetic is not None:
            rows = plan.rows
            counts = self.rule.synthetic.accepted(
                [row.request.seed for row in rows],
                [len(row.request.token_ids) for row in rows],
                [len(row.drafts) for row in rows],
            )
            return [
                take(drawn, row.drafts.ids, count) if drawn else NOTHING
                for row, drawn, count in zip(rows, targets, counts, strict=True)
            ]
        return [
            self.rule.compare(drawn, row.drafts.ids, row.drafts.parents) if drawn else NOTHING
            for row, drawn in zip(plan.rows, targets, strict=True)
        ]


def _errors(
    plan: StepPlan, target: TargetOutput, targets: Sequence[Sequence[int]], verdicts: Sequence[Verdict]
) -> dict[int, str]:
    """Why there is no token behind the accepted drafts of a row, for the rows where there is none."""
    errors: dict[int, str] = {}
    for index, verdict in enumerate(verdicts):
        if verdict.tokens and verdict.tokens[-1] == UNDRAWABLE:
            node = verdict.accepted[-1] if verdict.accepted else -1
            logits = target.logits[target.batch.logit_offsets[index] + 1 + node]
            request = plan.rows[index].request
            errors[index] = why_undrawable(request, targets[index], verdict.tokens[:-1], logits)
    return errors


def _logprobs(
    plan: StepPlan, target: TargetOutput, verdicts: Sequence[Verdict]
) -> dict[int, list[RowLogprobs]]:
    """The target's log-probabilities of the drawn tokens, for the rows that want them."""
    found: dict[int, list[RowLogprobs]] = {}
    for index, (row, verdict) in enumerate(zip(plan.rows, verdicts, strict=True)):
        wanted = row.request.params.logprobs
        if wanted is None or not verdict.tokens:
            continue
        first = target.batch.logit_offsets[index]
        where = [first, *(first + 1 + node for node in verdict.accepted)][: len(verdict.tokens)]
        chosen = torch.tensor(verdict.tokens, device=target.logits.device)
        found[index] = gather_logprobs(target.logits[where], chosen, wanted)
    return found
