"""The step in the plain order: schedule, forward, verify, commit, draft."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..contract import Commit
from ..runner.profiling import target_costs
from ..runner.runner import ModelRunner, TargetOutput
from ..sampling.logprobs import RowLogprobs, gather_logprobs
from ..verify.base import Verdict
from .drafting import Drafting
from .metrics import Counter, EngineMetrics, Gauge, Metric
from .output import RequestOutputState
from .pacing import Pacer
from .plan import StepPlan
from .request import NO_DRAFTS, Request, Status
from .scheduler import Scheduler
from .spans import Span
from .verification import RowOutcome, Verification

#: A value that this process found -> the one that all ranks go by.
Agree = Callable[[Any], Any]


def _as_it_is(value: Any) -> Any:
    return value


class EngineCore:
    """Requests in, tokens out. ``step`` is the plain order of the contract."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        runner: ModelRunner,
        verification: Verification,
        drafting: Drafting | None,
        metrics: EngineMetrics,
        tokenizer: Any = None,
        agree: Agree = _as_it_is,
    ) -> None:
        """``agree``: what other ranks found of a time, where there are several: choices go by one of them."""
        self._agree = agree
        self.scheduler = scheduler
        self.runner = runner
        self.verification = verification
        self.drafting = drafting
        self.metrics = metrics
        self.outputs: dict[Request, RequestOutputState] = {}
        self._touched: list[RequestOutputState] = []  # got something and were not returned yet
        self._ended: list[Request] = []  # met their stop and still hold blocks
        self._tokenizer = tokenizer
        self._forwards: list[Span] = []  # not counted yet
        self._drafted = False

    @property
    def has_unfinished(self) -> bool:
        return bool(self._touched) or self.scheduler.has_unfinished

    def prepare(self) -> None:
        """Make ready what a step needs, once, when the proposer has its KV."""
        pacer = self.drafting.policy.pacer if self.drafting is not None else None
        if pacer is not None:
            curve = self._agree(target_costs(self.runner, self._cost_points(pacer)))
            pacer.target.replace(curve)
            pacer.whole.replace(curve)

    def _cost_points(self, pacer: Pacer) -> list[tuple[int, int]]:
        """What of the target's cost is measured before the first step; the steps themselves tell the rest."""
        most_rows, on_gpu = self.scheduler.config.max_num_seqs, self.runner.device.type == "cuda"
        most_tokens = 1024 if on_gpu else 64
        rows = sorted({min(count, most_rows) for count in ((1, 8, 32, 128) if on_gpu else (1, 8))})
        return [(n, 1 + width) for n in rows for width in pacer.widths if n * (1 + width) <= most_tokens]

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
        """Run one step; the outputs of the requests that got tokens or ended.

        What computes comes before what changes a request. So when something raises, a failed
        allocation say, no request has moved: the next call computes the same again, and returns what
        this one would have.
        """
        self._run(self.scheduler.schedule())
        self._finish_ended()
        return self._hand_out()

    # -- the verbs ------------------------------------------------------------------------------
    def _run(self, plan: StepPlan) -> None:
        if not plan.rows:
            return
        started = time.perf_counter()
        target = self._forward(plan)
        scores = self._score_prompts(plan, target)
        verdicts, outcomes = self._verify(plan, target)
        self._advance(plan, scores, verdicts)
        self._deliver(outcomes)
        drafting = self._propose(plan, target, verdicts)
        self._took(plan, time.perf_counter() - started - drafting, drafting)
        self._compute_again(plan)
        self.scheduler.publish(plan)

    def _count_admissions(self, plan: StepPlan) -> None:
        for row in plan.rows:
            if row.request.stats.first_scheduled is None and not row.request.background:
                self._count_admission(row.request)

    def _count_admission(self, request: Request) -> None:
        stats = request.stats
        stats.first_scheduled = time.perf_counter()
        self.metrics.admitted(len(request.prompt_ids), stats.cached_tokens)

    def _forward(self, plan: StepPlan) -> TargetOutput:
        self._count_admissions(plan)
        span = Span(self.runner.device)
        target = self.runner.forward(plan)
        span.end()
        if plan.serves:
            self._forwards.append(span)
        self.metrics.steps.inc(plan.serves)
        return target

    @torch.inference_mode()
    def _score_prompts(self, plan: StepPlan, target: TargetOutput) -> dict[Request, list[RowLogprobs]]:
        """Log-probabilities of the prompts' tokens, for the requests that want them."""
        found: dict[Request, list[RowLogprobs]] = {}
        for row, offset in zip(plan.rows, target.batch.offsets, strict=True):
            request = row.request
            positions = request.positions_to_score(row.start, row.start + row.new)
            if not positions:
                continue
            assert request.prompt_logprobs is not None
            first = offset - row.start
            hidden = target.hidden[first + positions.start : first + positions.stop]
            scores = found[request] = []
            for logits in self.runner.logits_in_slices(hidden):
                start = positions.start + len(scores) + 1
                following = request.prompt_ids[start : start + len(logits)]
                scores += gather_logprobs(logits, following, request.prompt_logprobs)
        return found

    def _verify(self, plan: StepPlan, target: TargetOutput) -> tuple[list[Verdict], list[RowOutcome]]:
        started = time.perf_counter()
        found = self.verification.verify(plan, target)
        waited = self._count_forwards()
        if plan.serves:
            self.metrics.verify_seconds.inc(max(0.0, time.perf_counter() - started - waited))
        return found

    def _count_forwards(self) -> float:
        """Count those that the device is through with: how much longer they took it than the host."""
        longer = 0.0
        while self._forwards and (seconds := self._forwards[0].seconds()) is not None:
            self.metrics.target_seconds.inc(seconds)
            longer += max(0.0, seconds - self._forwards.pop(0).launching)
        return longer

    def _advance(
        self, plan: StepPlan, scores: Mapping[Request, list[RowLogprobs]], verdicts: Sequence[Verdict]
    ) -> None:
        """Commit what was drawn: the accepted nodes' KV is moved into place, the rest is given up."""
        self.runner.keep_accepted(plan, [verdict.accepted for verdict in verdicts])
        for request, found in scores.items():
            self.outputs[request].prompt_logprobs += found
            request.scored += len(found)
        for row, verdict in zip(plan.rows, verdicts, strict=True):
            request = row.request
            request.commit(verdict.tokens)
            computed = row.start + row.new + len(verdict.accepted)
            request.computed = min(computed, len(request.token_ids) - 1)  # equal unless the draw failed
            request.drafts = NO_DRAFTS

    def _deliver(self, outcomes: Sequence[RowOutcome]) -> None:
        """Show the drawn tokens to the outside, up to each request's stop, and to the proposer."""
        commits: list[Commit] = []
        now = time.perf_counter()
        if self.drafting is not None:
            self.drafting.verified(outcomes)
        for outcome in outcomes:
            request, drawn = outcome.request, outcome.drawn
            if request.status in (Status.ENDED, Status.FINISHED):
                continue  # aborted meanwhile, or drawn behind its stop
            state = self.outputs[request]
            kept = state.append(drawn)
            request.delivered += kept
            if not request.background:
                commits.append(
                    Commit(
                        id=request.id,
                        token_ids=tuple(drawn.ids[:kept]),
                        accepted=drawn.accepted,
                        prefill=outcome.prefill,
                    )
                )
                self.metrics.delivered(
                    request.stats,
                    drafted=outcome.drafted,
                    accepted=drawn.accepted,
                    kept=kept,
                    now=now,
                    adapter=None if request.adapter is None else request.adapter.name,
                )
            if kept or state.finish:
                self._touched.append(state)
            if state.finish:
                self._end(request)
        if self.drafting:
            self.drafting.committed(commits)

    def _end(self, request: Request) -> None:
        """Forget what was drawn behind the stop."""
        del request.token_ids[request.delivered :]
        request.computed = min(request.computed, request.delivered - 1)
        request.status = Status.ENDED
        self._ended.append(request)

    def _propose(self, plan: StepPlan, target: TargetOutput, verdicts: Sequence[Verdict]) -> float:
        """The seconds it took."""
        if self.drafting is None:
            return 0.0
        self._pace(plan)
        started = time.perf_counter()
        accepted = [verdict.accepted for verdict in verdicts]
        self.drafting.propose(plan, target, accepted, self.scheduler.num_running, later=self._drafted_later)
        seconds = time.perf_counter() - started
        # On a GPU the first call compiles, on all ranks at once, which is no cost of drafting.
        if self._drafted or self.runner.device.type != "cuda":
            self.metrics.propose_seconds.inc(seconds)
        self._drafted = True
        if self.drafting.proposer.quarantined:
            self.scheduler.forget_draft_layers()
        return seconds

    def _drafted_later(self, request: Request) -> bool:
        """Whether a request is only fed in this step, since another way of drafting takes over."""
        return False

    def _pace(self, plan: StepPlan) -> None:
        """Choose how much to draft, before anything is drafted."""
        if self.drafting is not None:
            self.drafting.pace((row.request for row in plan.rows), self.scheduler.num_running)

    def _took(self, plan: StepPlan, seconds: float, drafting: float) -> None:
        """Learn what a step of decoding rows costs: all but drafting, and drafting."""
        pacer = self.drafting.policy.pacer if self.drafting is not None else None
        decoding = all(row.new == 1 and not (row.prefill or row.catch_up) for row in plan.rows)
        if pacer is None or not decoding:
            return
        rows, (seconds, drafting) = len(plan.rows), self._agree((seconds, drafting))
        pacer.target.observe(rows, plan.num_tokens / rows, seconds)
        pacer.drafting.observe(rows, pacer.offered, drafting)

    def _compute_again(self, plan: StepPlan) -> None:
        """Drop what was computed beside drafts that gave NaN."""
        for row in plan.rows:
            if row.drafts and row.request.undrafted and row.request.status is Status.RUNNING:
                self.scheduler.preempt(row.request)

    def _finish_ended(self) -> None:
        while self.scheduler.lost:
            request, why = self.scheduler.lost.pop(0)
            state = self.outputs[request]
            state.end("error", why)
            self._touched.append(state)
            self._end(request)
        while self._ended:
            request = self._ended.pop(0)
            if request.status is Status.ENDED:
                self._finish(request)

    def _hand_out(self) -> list[RequestOutputState]:
        touched, self._touched = self._touched, []
        return touched

    def _finish(self, request: Request) -> None:
        state = self.outputs.pop(request)
        assert state.finish is not None
        self.scheduler.finish(request, state.finish.reason)
        if request.background:
            return
        if self.drafting:
            self.drafting.finished(request, state.finish.reason)
        request.stats.finished = time.perf_counter()
        self.metrics.finished(request.stats, len(state.token_ids))

    def forget_learned(self) -> None:
        """What drafts gained and steps took is learned anew."""
        if self.drafting is not None and self.drafting.policy.pacer is not None:
            self.drafting.policy.pacer.forget_all()

    def drop_kv(self) -> None:
        """Take all that is cached: a request that runs is computed again, from its tokens."""
        for request in list(self.scheduler.running):
            self.scheduler.preempt(request)
        reset = self.scheduler.pool.reset_cache()
        assert reset, "somebody holds blocks beside the requests that run"

    def read_metrics(self) -> list[Metric]:
        """What is counted, and what the proposer counts, as ``<method>.<its name>``."""
        own = self.drafting.proposer.metrics() if self.drafting else {}
        gauges = [Gauge(name=name, reading=value) for name, value in own.items() if math.isfinite(value)]
        return [*self.metrics.snapshot(), *gauges]

    def close(self) -> None:
        """End all requests and free the proposer."""
        for request in [*self.scheduler.running, *self.scheduler.waiting]:
            self.abort(request)
        if self.drafting:
            self.drafting.proposer.close()


@contextmanager
def timed(counter: Counter) -> Iterator[None]:
    """Add the seconds of a block to ``counter``."""
    start = time.perf_counter()
    try:
        yield
    finally:
        counter.inc(time.perf_counter() - start)
