"""The step: schedule, forward, verify, commit, draft. In the plain order, and one step late."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch

from ..contract import Commit
from ..runner.runner import ModelRunner, TargetOutput
from ..sampling.logprobs import RowLogprobs, gather_logprobs
from ..sampling.sampler import UNDRAWABLE
from ..verify.base import Rule, Verdict
from .drafting import Drafting
from .draws import NAN_LOGITS, draw_targets, why_undrawable
from .metrics import Counter, EngineMetrics
from .output import DrawnTokens, RequestOutputState
from .plan import RowPlan, StepPlan
from .request import NO_DRAFTS, Request, Status
from .scheduler import Scheduler

NOTHING = Verdict((), ())


@attrs.frozen(eq=False)
class RowOutcome:
    """What a step made of one row, before the stop conditions are looked at."""

    row: RowPlan
    drawn: DrawnTokens


class EngineCore:
    """Requests in, tokens out. ``step`` is the plain order of the contract."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        runner: ModelRunner,
        rule: Rule,
        drafting: Drafting | None,
        metrics: EngineMetrics,
        vocab_size: int,
        tokenizer: Any = None,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.rule = rule
        self.drafting = drafting
        self.metrics = metrics
        self.outputs: dict[Request, RequestOutputState] = {}
        self._vocab_size = vocab_size
        self._tokenizer = tokenizer

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.outputs[request] = RequestOutputState.create(request, self._tokenizer)
        self.scheduler.add(request)

    def abort(self, request: Request) -> None:
        """End a request now; its output is what was delivered so far."""
        if request.status is not Status.FINISHED:
            self.outputs[request].end("abort")
            self._finish(request)

    def step(self) -> list[RequestOutputState]:
        """Run one step; the outputs of the requests that got tokens or ended."""
        plan = self._schedule()
        if not plan.rows:
            return []
        target = self._forward(plan)
        self._score_prompts(plan, target)
        verdicts, outcomes = self._verify(plan, target)
        self._advance(plan, verdicts)
        touched = self._deliver(outcomes)
        self._propose(plan, target, verdicts)
        self._compute_again(plan)
        self.scheduler.publish(plan)
        self._finish_ended(outcomes)
        return touched

    # -- the verbs ------------------------------------------------------------------------------
    def _schedule(self) -> StepPlan:
        plan = self.scheduler.schedule()
        assert plan is not None  # it may preempt
        return plan

    def _count_admissions(self, plan: StepPlan) -> None:
        for row in plan.rows:
            if row.request.stats.first_scheduled is None:
                self._count_admission(row.request)

    def _count_admission(self, request: Request) -> None:
        stats = request.stats
        stats.first_scheduled = time.perf_counter()
        self.metrics.prompt_tokens.inc(len(request.prompt_ids))
        self.metrics.prefix_queries.inc(len(request.prompt_ids))
        self.metrics.prefix_hits.inc(stats.cached_tokens)

    def _forward(self, plan: StepPlan) -> TargetOutput:
        self._count_admissions(plan)
        with timed(self.metrics.target_seconds):
            target = self.runner.forward(plan)
        self.metrics.steps.inc()
        self.metrics.preemptions.set(self.scheduler.num_preemptions)
        return target

    @torch.inference_mode()
    def _score_prompts(self, plan: StepPlan, target: TargetOutput) -> None:
        """Log-probabilities of the prompts' tokens, for the requests that want them."""
        for row, offset in zip(plan.rows, target.batch.offsets, strict=True):
            request = row.request
            positions = request.positions_to_score(row.start, row.start + row.new)
            if not positions:
                continue
            assert request.prompt_logprobs is not None
            first = offset - row.start
            hidden = target.hidden[first + positions.start : first + positions.stop]
            scores = self.outputs[request].prompt_logprobs
            for logits in self.runner.logits_in_slices(hidden):
                following = request.prompt_ids[len(scores) + 1 : len(scores) + 1 + len(logits)]
                scores += gather_logprobs(logits, following, request.prompt_logprobs)
            request.scored = len(scores)

    @torch.inference_mode()
    def _verify(self, plan: StepPlan, target: TargetOutput) -> tuple[list[Verdict], list[RowOutcome]]:
        """Draw the target's own token at every verified position, then walk each row's drafts."""
        with timed(self.metrics.verify_seconds):
            targets = draw_targets(plan, target.logits, target.batch.logit_offsets, self._vocab_size)
            verdicts = [
                self.rule(drawn, row.drafts.ids, row.drafts.parents) if drawn else NOTHING
                for row, drawn in zip(plan.rows, targets, strict=True)
            ]
            errors = self._errors(target, targets, verdicts)
            for index, error in errors.items():
                row, verdict = plan.rows[index], verdicts[index]
                if error == NAN_LOGITS and row.drafts:
                    # A draft's NaN reaches the tokens computed beside it: ask again without drafts.
                    row.request.undrafted = True
                    verdicts[index] = NOTHING
                else:
                    row.request.failed = True
                    verdicts[index] = attrs.evolve(verdict, tokens=verdict.tokens[:-1])
            logprobs = self._logprobs(plan, target, verdicts)
        outcomes = [
            RowOutcome(
                row,
                DrawnTokens(
                    verdict.tokens,
                    len(verdict.accepted),
                    logprobs.get(index),
                    errors[index] if row.request.failed else None,
                ),
            )
            for index, (row, verdict) in enumerate(zip(plan.rows, verdicts, strict=True))
        ]
        return verdicts, outcomes

    def _errors(
        self, target: TargetOutput, targets: Sequence[Sequence[int]], verdicts: Sequence[Verdict]
    ) -> dict[int, str]:
        """Why there is no token behind the accepted drafts of a row, for the rows where there is none."""
        errors: dict[int, str] = {}
        for index, verdict in enumerate(verdicts):
            if verdict.tokens and verdict.tokens[-1] == UNDRAWABLE:
                node = verdict.accepted[-1] if verdict.accepted else -1
                logits = target.logits[target.batch.logit_offsets[index] + 1 + node]
                errors[index] = why_undrawable(targets[index], logits)
        return errors

    def _logprobs(
        self, plan: StepPlan, target: TargetOutput, verdicts: Sequence[Verdict]
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

    def _advance(self, plan: StepPlan, verdicts: Sequence[Verdict]) -> None:
        """Commit what was drawn: the accepted nodes' KV is moved into place, the rest is given up."""
        self.runner.keep_accepted(plan, [verdict.accepted for verdict in verdicts])
        for row, verdict in zip(plan.rows, verdicts, strict=True):
            request = row.request
            first = request.num_output == 0
            request.token_ids.extend(verdict.tokens)
            computed = row.start + row.new + len(verdict.accepted)
            request.computed = min(computed, len(request.token_ids) - 1)  # equal unless the draw failed
            request.drafts = NO_DRAFTS
            if request.history is not None:
                request.history.extend(verdict.tokens)
            if verdict.tokens:
                self.metrics.verified(
                    request.stats, len(row.drafts), len(verdict.accepted), len(verdict.tokens), first=first
                )

    def _deliver(self, outcomes: Sequence[RowOutcome]) -> list[RequestOutputState]:
        """Show the drawn tokens to the outside, up to each request's stop, and to the proposer."""
        touched: list[RequestOutputState] = []
        commits: list[Commit] = []
        now = time.perf_counter()
        for outcome in outcomes:
            request, drawn = outcome.row.request, outcome.drawn
            if request.status is Status.FINISHED:
                continue  # aborted meanwhile
            state = self.outputs[request]
            kept = state.append(drawn)
            request.delivered += kept
            commits.append(
                Commit(
                    id=request.id,
                    token_ids=tuple(drawn.ids[:kept]),
                    accepted=drawn.accepted,
                    prefill=outcome.row.prefill,
                )
            )
            if kept:
                self.metrics.generation_tokens.inc(kept)
                if request.stats.first_token is None:
                    request.stats.first_token = now
                    self.metrics.time_to_first_token.observe(now - request.stats.arrival)
            if kept or state.finish:
                touched.append(state)
            if state.finish:
                self._end(request)
        if self.drafting:
            self.drafting.committed(commits)
        return touched

    def _end(self, request: Request) -> None:
        """Forget what was drawn behind the stop."""
        del request.token_ids[request.delivered :]
        request.computed = min(request.computed, request.delivered - 1)
        request.status = Status.ENDED

    def _propose(self, plan: StepPlan, target: TargetOutput, verdicts: Sequence[Verdict]) -> None:
        if self.drafting is None:
            return
        with timed(self.metrics.propose_seconds):
            accepted = [verdict.accepted for verdict in verdicts]
            self.drafting.propose(plan, target, accepted, len(self.scheduler.running))
        if self.drafting.proposer.quarantined:
            self.scheduler.forget_draft_layers()

    def _compute_again(self, plan: StepPlan) -> None:
        """Drop what was computed beside drafts that gave NaN."""
        for row in plan.rows:
            if row.drafts and row.request.undrafted and row.request.status is Status.RUNNING:
                self.scheduler.preempt(row.request)

    def _finish_ended(self, outcomes: Sequence[RowOutcome]) -> None:
        for outcome in outcomes:
            if outcome.row.request.status is Status.ENDED:
                self._finish(outcome.row.request)

    def _finish(self, request: Request) -> None:
        state = self.outputs.pop(request)
        assert state.finish is not None
        self.scheduler.finish(request, state.finish.reason)
        if self.drafting:
            self.drafting.finished(request, state.finish.reason)
        request.stats.finished = time.perf_counter()
        self.metrics.finished(request.stats, len(state.token_ids))

    def close(self) -> None:
        """End all requests and free the proposer."""
        for request in [*self.scheduler.running, *self.scheduler.waiting]:
            self.abort(request)
        if self.drafting:
            self.drafting.proposer.close()


class LateEngineCore(EngineCore):
    """The same verbs, with the host one step behind: what a step drew is delivered after the next drafted.

    A request that met its stop computes one step more, which is thrown away. When the pool is full
    the host first learns who ended, and only then is anything taken away from anybody.
    """

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self._pending: list[RowOutcome] = []
        self._drained: list[RequestOutputState] = []

    @property
    def has_unfinished(self) -> bool:
        return bool(self._pending or self._drained) or super().has_unfinished

    def step(self) -> list[RequestOutputState]:
        plan = self._schedule()
        if not plan.rows:
            return self._drain()
        target = self._forward(plan)
        self._score_prompts(plan, target)
        verdicts, outcomes = self._verify(plan, target)
        self._advance(plan, verdicts)
        previous, self._pending = self._pending, outcomes
        self._propose(plan, target, verdicts)
        self._compute_again(plan)
        self.scheduler.publish(plan)
        touched = self._deliver(previous)
        self._finish_ended(previous)
        drained, self._drained = self._drained, []
        return [*drained, *touched]

    def _schedule(self) -> StepPlan:
        plan = self.scheduler.schedule(may_preempt=not self._pending)
        if plan is None:
            self._drained = self._drain()
            return super()._schedule()
        return plan

    def _drain(self) -> list[RequestOutputState]:
        """Deliver what is pending."""
        previous, self._pending = self._pending, []
        touched = self._deliver(previous)
        self._finish_ended(previous)
        drained, self._drained = self._drained, []
        return [*drained, *touched]


@contextmanager
def timed(counter: Counter) -> Iterator[None]:
    """Add the seconds of a block to ``counter``."""
    start = time.perf_counter()
    try:
        yield
    finally:
        counter.inc(time.perf_counter() - start)
