"""Feeds the proposer after each step and takes its drafts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import torch

from ..contract import Commit, Needs, Proposer, RequestInfo, Shape, StepView
from ..runner.runner import ModelRunner, TargetOutput
from ..sampling.batch import SamplingBatch
from ..sampling.laws import law, laws_in_order
from ..sampling.sampler import rank
from ..sampling.streams import Stream
from ..verify.base import Rule
from .control import DraftPolicy
from .draws import sample_row
from .feed import FedRow, Feed, make_drafts
from .guard import GuardedProposer
from .metrics import EngineMetrics
from .plan import RowPlan, StepPlan
from .request import Request, Status
from .taking import take_drafts


class Drafting:
    """One proposer's life in the engine. Also the scheduler's :class:`Lifecycle`."""

    def __init__(
        self,
        proposer: GuardedProposer,
        needs: Needs,
        policy: DraftPolicy,
        runner: ModelRunner,
        vocab_size: int,
        metrics: EngineMetrics,
        rule: Rule,
    ) -> None:
        self.proposer = proposer
        self.needs = needs
        self._rule = rule
        self._policy = policy
        self._runner = runner
        self._vocab_size = vocab_size
        self._metrics = metrics

    # -- lifecycle ------------------------------------------------------------------------------
    def added(self, request: Request, *, resumed: bool) -> None:
        if request.background:
            return
        info = RequestInfo(
            id=request.id,
            namespace=request.namespace,
            token_ids=tuple(request.token_ids),
            prompt_len=len(request.prompt_ids),
            params=request.params,
            resumed=resumed,
        )
        self.proposer.on_add(info)

    def preempted(self, request: Request) -> None:
        if not request.background:
            self.proposer.on_preempt(request.id)

    def committed(self, commits: Sequence[Commit]) -> None:
        if commits:
            self.proposer.on_commit(commits)

    def finished(self, request: Request, reason: str) -> None:
        if request.admitted:
            self.proposer.on_finish(request.id, reason)

    # -- a step ---------------------------------------------------------------------------------
    @torch.inference_mode()
    def propose(
        self, plan: StepPlan, output: TargetOutput, accepted: Sequence[Sequence[int]], num_running: int
    ) -> None:
        """Feed this step's committed tokens and set the drafts of the next one.

        Rows in the background are left out, and rows that have nothing to feed: those whose draw failed.

        Args:
            accepted: for each row of ``plan`` its accepted draft nodes, in path order.
        """

        def draft(proposer: Proposer) -> None:
            fed = {
                place: self._fed_row(row, offset, nodes, num_running)
                for place, (row, offset, nodes) in enumerate(
                    zip(plan.rows, output.batch.offsets, accepted, strict=True)
                )
                if not row.request.background
            }
            fed = {place: row for place, row in fed.items() if row.start < row.end}
            if not fed:
                return
            rows = list(fed.values())
            drafts = make_drafts(self.needs, len(rows), self._vocab_size, self._runner.device)
            proposer.propose(StepView(self.needs, self._feed(fed, output)), drafts)
            self._advance_entries(rows)
            faults = take_drafts(
                drafts,
                rows,
                self._vocab_size,
                chain=self.needs.shape is Shape.CHAIN,
                weighed=self._rule.weigh is not None,
            )
            self._metrics.drafts_dropped.inc(faults)

        if not self.proposer.propose(draft) and not self.proposer.quarantined:
            self._heal(plan)

    def _feed(self, fed: Mapping[int, FedRow], output: TargetOutput) -> Feed:
        """``fed``: place in the plan -> row."""
        return Feed(
            list(fed.values()),
            kv=self.needs.kv,
            slots=output.batch.slots.select(list(fed)),
            taps=output.taps,
            vocab_size=self._vocab_size,
            sampler=self._sample,
            laws=self._laws,
            check=self._check_writes if self._runner.check_writes else None,
            device=self._runner.device,
        )

    def _fed_row(self, row: RowPlan, offset: int, accepted: Sequence[int], num_running: int) -> FedRow:
        """What of a row is fed, and how much it may draft.

        Without taps entries are made from ids alone, so the feed starts where they end and can make
        up for any gap. With taps an entry wants the hidden state of the token before it, so the feed
        is what this step computed.
        """
        request, needs = row.request, self.needs
        end = request.computed + 1
        if needs.kv and not needs.taps:
            start = min(request.own)
            end = min(end, start + row.new + len(accepted) + row.catch_up + 1)
        else:
            start = row.start + 1 if row.start else 0
        drafting = (
            request.status is Status.RUNNING
            and request.todo == 1  # else the prompt is unfinished
            and end == request.computed + 1
            and request.table.capacity >= (len(request.token_ids) + needs.reserve if needs.kv else 0)
        )
        room = min(needs.depth, request.room) if drafting else 0
        budget = self._policy.budget(request, num_running) if room else 0
        if needs.shape is Shape.CHAIN:
            budget = min(budget, room)
        drafts_start = offset + row.new
        hidden = [*range(offset, drafts_start), *(drafts_start + node for node in accepted)]
        return FedRow(row, start, end, budget, room, hidden)

    def _sample(
        self, logits: torch.Tensor, requests: list[Request], positions: list[int], k: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return rank(logits, self._drafted(logits, requests, positions), k)

    def _laws(
        self, logits: torch.Tensor, requests: list[Request], positions: list[int], ids: torch.Tensor
    ) -> torch.Tensor:
        return laws_in_order(law(logits, self._drafted(logits, requests, positions)), torch.as_tensor(ids))

    def _drafted(self, logits: torch.Tensor, requests: list[Request], positions: list[int]) -> SamplingBatch:
        draws = [
            attrs.evolve(
                sample_row(request, position),
                stream=self._rule.stream(Stream.DRAFT, len(request.token_ids)),
            )
            for request, position in zip(requests, positions, strict=True)
        ]
        return SamplingBatch.build(draws, self._vocab_size, logits.device)

    def _check_writes(self, write_slots: torch.Tensor) -> None:
        self._runner.assert_writable(write_slots, draft=True)

    def _advance_entries(self, rows: Sequence[FedRow]) -> None:
        for row in rows:
            own = row.request.own
            for spec, length in enumerate(own):
                if row.start <= length:
                    own[spec] = max(length, row.end)

    def _heal(self, plan: StepPlan) -> None:
        """After a failed feed with taps, have the target compute those positions again.

        Its own KV is true already and is not written a second time.
        """
        if not (self.needs.kv and self.needs.taps):
            return
        for row in plan.rows:
            request = row.request
            if request.background or request.status is not Status.RUNNING:
                continue
            if min(request.own) < request.computed + 1:
                request.target_floor = max(request.target_floor, request.computed)
                request.computed = max(0, min(request.own) - 1)
