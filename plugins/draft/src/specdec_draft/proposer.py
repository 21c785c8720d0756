"""The draft model at work."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from specdecode.contract import Drafts, Proposer, Resources, StepView, TargetHandle
from specdecode.models import load_model, resolve_model

from .config import DraftModelConfig
from .plan import Plan
from .translation import Translation

logger = logging.getLogger(__name__)


class DraftModelProposer(Proposer):
    """A decoder that is fed the committed tokens, then its own, one level a forward.

    Its state is its KV, which core pages and feeds, so rejections, preemptions, prefix hits and spells
    without drafts are nothing it knows of. All rows run all levels, whatever their budget: how many are
    wanted is known on the device only, which nobody waits for.
    """

    def __init__(self, config: DraftModelConfig, plan: Plan) -> None:
        self._config = config
        self._plan = plan
        self._length = config.num_speculative_tokens
        self._draws = config.draft_sample_method == "probabilistic"
        self._closed = False

    def load(self, target: TargetHandle) -> None:
        plan = self._plan
        self._decoder = load_model(
            resolve_model(plan.folder),
            dtype=getattr(torch, plan.dtype),
            device=target.device,
            max_model_len=plan.context,
            quantization=self._config.quantization,
        )
        self._translation = Translation(plan.vocabulary, target.device)
        if plan.vocabulary.shared < target.info.vocab_size:
            logger.info(
                "the draft knows %d of the target's %d token ids; the others are never drafted",
                plan.vocabulary.shared,
                target.info.vocab_size,
            )
        self._context: int | None = None
        if plan.context < target.info.max_model_len:
            self._context = plan.context
            logger.warning(
                "the draft's context is %d tokens and the target's %d: longer texts go on without drafts",
                plan.context,
                target.info.max_model_len,
            )

    def bind(self, resources: Resources) -> None:
        self._caches: Sequence[tuple[Any, Any]] = resources.kv[0]

    def propose(self, step: StepView, out: Drafts) -> None:
        positions = step.positions
        hidden = self._forward(step, step.ids, step.rows, positions)[step.last]
        committed = step.committed_len
        rows = torch.arange(len(committed), device=committed.device)
        for level in range(self._length):
            logits = self._translation.logits(self._decoder.compute_logits(hidden))
            place = committed + level
            if self._draws:
                drawn, _ = step.sample(logits, rows, place)
                ids = drawn[:, 0]
                if out.probs is not None:
                    out.probs[:, level] = step.probs(logits, rows, place, drawn)[:, 0]
            else:
                ids = logits.argmax(dim=-1)
            out.ids[:, level] = ids
            if level + 1 < self._length:
                hidden = self._forward(step, ids, rows, place)
        out.lens.copy_(self._limits(step))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.__dict__.pop("_decoder", None)
            self.__dict__.pop("_caches", None)

    def _limits(self, step: StepView) -> torch.Tensor:
        limits: torch.Tensor = torch.minimum(step.budget, step.room)
        if self._context is None:
            return limits
        return torch.minimum(limits, (self._context - step.committed_len).clamp(min=0))

    def _forward(
        self, step: StepView, ids: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Hidden states ``[T, H]``; the entry of each token goes to the slot of its position."""
        meta = step.ctx(rows, positions, positions + 1)
        if self._context is not None:
            # Behind its context a row is fed for its neighbours' sake alone: nothing of it is drafted from.
            positions = positions.clamp(max=self._context - 1)
        hidden: torch.Tensor = self._decoder(self._translation.feed(ids), positions, meta, self._caches)[0]
        return hidden
