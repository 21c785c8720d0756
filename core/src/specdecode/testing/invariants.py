"""What holds of an engine between any two steps, whatever it was asked; for tests that drive one by hand."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from ..engine.loop import EngineCore
from ..engine.plan import StepPlan
from ..engine.request import Request, Status
from ..kv.keys import BlockKeys
from .dense import DenseRow

#: Rounding of keys and values that were computed in other chunks, float32.
_ROUNDING = 1e-4


def check_core(core: EngineCore) -> None:
    """Queues, tables, tokens and outputs fit together.

    Raises:
        AssertionError: says what does not.
    """
    scheduler = core.scheduler
    running, waiting = scheduler.running, list(scheduler.waiting)
    requests = [*running, *waiting]
    assert len(set(requests)) == len(requests), "a request is queued twice"
    assert set(requests) == set(core.outputs), "requests and outputs differ"
    assert len(running) <= scheduler.config.max_num_seqs
    scheduler.check()
    for request in waiting:
        assert request.status is Status.WAITING, f"{request.id} waits and is {request.status}"
        assert not request.table.blocks and not request.computed, f"{request.id} waits and holds blocks"
    for request in running:
        assert request.status is Status.RUNNING, f"{request.id} runs and is {request.status}"
        _check_tokens(request)
    for request, state in core.outputs.items():
        delivered = request.token_ids[len(request.prompt_ids) : request.delivered]
        assert state.token_ids == delivered, f"{request.id} was shown {state.token_ids}, not {delivered}"
        assert len(state.sources) == len(state.token_ids)
        assert state.finish is None, f"{request.id} has ended and is still here"


def _check_tokens(request: Request) -> None:
    committed, capacity = len(request.token_ids), request.table.capacity
    assert 0 <= request.computed < committed <= request.limit, f"{request.id}: {request.computed} computed"
    assert request.computed <= capacity, f"{request.id}: KV of {request.computed} tokens in {capacity} slots"
    for floor in (request.target_floor, request.draft_floor):
        assert floor <= capacity, f"{request.id} keeps {floor} slots as they are and has {capacity}"
    assert all(own <= request.computed + 1 for own in request.own), f"{request.id}: entries {request.own}"
    depths = request.drafts.depths()
    assert max(depths, default=0) <= request.room, f"{request.id}: drafts {depths} deep in {request.room}"


class EngineWatch:
    """Checks each plan and each published block of an engine, from the moment it is made.

    A published block must hold the KV that a dense forward over its tokens gives, and go on holding
    it. ``model`` computes that; float32 only.
    """

    def __init__(self, core: EngineCore, model: Any) -> None:
        self.core = core
        self.steps = 0  #: plans with rows
        self._model = model
        self._arrivals: dict[Request, int] = {}
        self._tokens: dict[bytes, tuple[int, ...]] = {}  # of a key: all up to the block's end
        self._dense: dict[tuple[int, ...], torch.Tensor] = {}
        self._right: set[tuple[bytes, int]] = set()
        scheduler = core.scheduler
        self._schedule, self._publish, self._add = scheduler.schedule, scheduler.publish_blocks, scheduler.add
        scheduler.schedule = self._watched_schedule  # type: ignore[method-assign]
        scheduler.publish_blocks = self._watched_publish  # type: ignore[method-assign]
        scheduler.add = self._watched_add  # type: ignore[method-assign]

    # -- queues and plans -----------------------------------------------------------------------
    def _watched_add(self, request: Request) -> None:
        self._arrivals[request] = len(self._arrivals)
        self._add(request)

    def _watched_schedule(self, apart: Collection[Request] = ()) -> StepPlan:
        before = set(self.core.scheduler.running)
        plan = self._schedule(apart)
        self._check_plan(plan, apart)
        admitted = [request for request in self.core.scheduler.running if request not in before]
        for waiting in self.core.scheduler.waiting:
            for request in () if waiting.waits_for_leader else admitted:
                assert self._arrivals[request] < self._arrivals[waiting], f"{request.id} jumped the queue"
        self.steps += bool(plan.rows)
        return plan

    def _check_plan(self, plan: StepPlan, apart: Collection[Request]) -> None:
        config = self.core.scheduler.config
        charged = sum(row.num_tokens + row.catch_up for row in plan.rows)
        assert charged <= config.max_num_batched_tokens, f"{charged} tokens in one step"
        assert len({row.request for row in plan.rows}) == len(plan.rows) <= config.max_num_seqs
        for row in plan.rows:
            request = row.request
            assert row.new >= 1 and row.catch_up >= 0 and row.start == request.computed
            assert row.start + row.num_tokens <= request.table.capacity, f"{request.id} has no slots"
            assert row.samples or not row.drafts, f"drafts behind an unfinished prompt of {request.id}"
        running = self.core.scheduler.running
        active = [r for r in running if not (r.at_limit or r.failed or r in apart)]
        if active and config.chunked_prefill:
            assert active[0] in {row.request for row in plan.rows}, "the eldest does not get on"

    # -- published blocks -----------------------------------------------------------------------
    def _watched_publish(self, request: Request) -> None:
        size = self.core.scheduler.pool.block_size
        keys = BlockKeys(request.namespace, size)
        for index in range(len(request.token_ids) // size):
            end = (index + 1) * size
            self._tokens[keys.key(index, request.token_ids)] = tuple(request.token_ids[:end])
        self._publish(request)
        self._check_published(self._right)

    def check_published(self) -> None:
        """Compare all blocks there are once more: nothing may have been written since."""
        self._check_published(set())

    def _check_published(self, known: set[tuple[bytes, int]]) -> None:
        pool = self.core.scheduler.pool
        published = set(pool.published.items())
        for key, block in published - known:
            assert key in self._tokens, f"block {block} is published under a key of no request"
            tokens = self._tokens[key]
            for layer, (got, want) in enumerate(
                zip(self._stored(block), self._expected(tokens), strict=True)
            ):
                far = float((got - want).abs().max())
                assert far < _ROUNDING, f"layer {layer} of block {block}, tokens {tokens}, is {far} off"
        self._right = published

    def _stored(self, block: int) -> torch.Tensor:
        """``[layers, size, heads * (k_dim + v_dim)]``"""
        return _flat([(keys[block], values[block]) for keys, values in self.core.runner.store.target])

    @torch.inference_mode()
    def _expected(self, tokens: tuple[int, ...]) -> torch.Tensor:
        """KV of the last block of ``tokens``, as :meth:`_stored`."""
        if tokens not in self._dense:
            model, size = self._model, self.core.scheduler.pool.block_size
            shape = (model.kv_heads, model.config.head_dim, model.config.value_dim)
            row = DenseRow([shape] * model.config.num_layers, len(tokens), model)
            positions = torch.arange(len(tokens), device=model.device)
            ids = torch.tensor(tokens, device=model.device)
            model(ids, positions, row.metadata(positions, positions + 1), row.caches, ())
            kv = _flat([(keys[0], values[0]) for keys, values in row.caches])
            for end in range(size, len(tokens) + 1, size):
                self._dense[tokens[:end]] = kv[:, end - size : end]
        return self._dense[tokens]


def _flat(layers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    return torch.stack([torch.cat([keys.flatten(1), values.flatten(1)], 1) for keys, values in layers])
