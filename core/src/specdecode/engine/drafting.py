"""Feeds the proposer after each step and takes its drafts, never trusting them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..contract import Commit, Drafts, Needs, RequestInfo, Shape, StepView
from ..runner.runner import ModelRunner, TargetOutput
from ..sampling.batch import SamplingBatch
from ..sampling.sampler import rank
from .control import DraftPolicy
from .draws import sample_row
from .feed import FedRow, Feed, make_drafts
from .guard import GuardedProposer
from .metrics import EngineMetrics
from .plan import RowPlan, StepPlan
from .request import NO_DRAFTS, Request, RowDrafts, Status


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
    ) -> None:
        self.proposer = proposer
        self.needs = needs
        self._policy = policy
        self._runner = runner
        self._vocab_size = vocab_size
        self._metrics = metrics

    # -- lifecycle ------------------------------------------------------------------------------
    def added(self, request: Request, *, resumed: bool) -> None:
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

        Args:
            accepted: for each row of ``plan`` its accepted draft nodes, in path order.
        """
        rows = [
            self._fed_row(row, offset, nodes, num_running)
            for row, offset, nodes in zip(plan.rows, output.batch.offsets, accepted, strict=True)
        ]
        feed = Feed(
            rows,
            kv=self.needs.kv,
            slots=output.batch.slots,
            taps=output.taps,
            vocab_size=self._vocab_size,
            sampler=self._sample,
            check=self._check_writes if self._runner.check_writes else None,
            device=self._runner.device,
        )
        drafts = make_drafts(self.needs, len(rows), self._vocab_size, self._runner.device)
        if self.proposer.propose(StepView(self.needs, feed), drafts):
            self._advance_entries(rows)
            self._take(rows, drafts)
        elif not self.proposer.quarantined:
            self._heal(rows)
        self._metrics.proposer_failures.set(self.proposer.failures)

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
        draws = [sample_row(request, position) for request, position in zip(requests, positions, strict=True)]
        return rank(logits, SamplingBatch.build(draws, self._vocab_size, logits.device), k)

    def _check_writes(self, write_slots: torch.Tensor) -> None:
        self._runner.assert_writable(write_slots, draft=True)

    def _advance_entries(self, rows: Sequence[FedRow]) -> None:
        for row in rows:
            own = row.request.own
            for spec, length in enumerate(own):
                if row.start <= length:
                    own[spec] = max(length, row.end)

    def _heal(self, rows: Sequence[FedRow]) -> None:
        """After a failed feed with taps, have the target compute those positions again.

        Its own KV is true already and is not written a second time.
        """
        if not (self.needs.kv and self.needs.taps):
            return
        for row in rows:
            request = row.request
            if request.status is Status.RUNNING and min(request.own) < request.computed + 1:
                request.target_floor = max(request.target_floor, request.computed)
                request.computed = max(0, min(request.own) - 1)

    # -- taking drafts --------------------------------------------------------------------------
    def _take(self, rows: Sequence[FedRow], drafts: Drafts) -> None:
        lens, ids, parents = (_host(value) for value in (drafts.lens, drafts.ids, drafts.parents))
        for index, row in enumerate(rows):
            claimed = int(lens[index])
            if claimed <= 0:
                continue
            count = min(claimed, row.budget)
            taken, faults = self._valid(
                ids[index, :count].tolist(), parents[index, :count].tolist(), row.room
            )
            row.request.drafts = taken
            faults += claimed - count
            if faults:
                self._metrics.drafts_dropped.inc(faults)

    def _valid(self, ids: list[int], parents: list[int], room: int) -> tuple[RowDrafts, int]:
        """The row up to its first bad node, without nodes deeper than ``room``; and how many were bad.

        A bad node is an id outside the vocabulary or a parent that does not come before its child.
        """
        kept_ids: list[int] = []
        kept_parents: list[int] = []
        place = {-1: -1}
        depth = {-1: 0}
        for node, (token, parent) in enumerate(zip(ids, parents, strict=True)):
            if not (0 <= token < self._vocab_size and -1 <= parent < node):
                return _row_drafts(kept_ids, kept_parents), len(ids) - node
            depth[node] = depth[parent] + 1
            if depth[node] <= room and parent in place:
                place[node] = len(kept_ids)
                kept_ids.append(token)
                kept_parents.append(place[parent])
        return _row_drafts(kept_ids, kept_parents), 0


def _row_drafts(ids: list[int], parents: list[int]) -> RowDrafts:
    return RowDrafts(tuple(ids), tuple(parents)) if ids else NO_DRAFTS


def _host(value: Any) -> np.ndarray:
    return value.cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
