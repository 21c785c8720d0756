"""The draft model at work."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from specdecode.contract import Drafts, Proposer, Resources, StepView, TargetHandle
from specdecode.heads.drawing import draw
from specdecode.heads.stopping import all_drafted
from specdecode.models import load_model, resolve_model

from .config import DraftModelConfig
from .plan import Plan
from .translation import Translation

logger = logging.getLogger(__name__)


class DraftModelProposer(Proposer):
    """A decoder that is fed the committed tokens, then its own, one level a forward.

    Its state is its KV, which core pages and feeds, so rejections, preemptions, prefix hits and spells
    without drafts are nothing it knows of. On a GPU all rows run all levels, whatever their budget: how many
    are wanted is known on the device only, which nobody waits for.
    """

    def __init__(self, config: DraftModelConfig, plan: Plan) -> None:
        self._config = config
        self._plan = plan
        self._length = config.num_speculative_tokens
        self._draws = config.draft_sample_method == "probabilistic"
        self._closed = False

    def load(self, target: TargetHandle) -> None:
        plan, self._device = self._plan, target.device
        load_format = "dummy" if plan.dummy else "auto"
        self._decoder = load_model(
            resolve_model(plan.folder, load_format=load_format),
            load_format=load_format,
            dtype=getattr(torch, plan.dtype),
            device=target.device,
            max_model_len=plan.context,
            quantization=self._config.quantization,
            group=target.group if plan.ranks > 1 else None,
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
        self._rows = torch.arange(resources.max_num_seqs, device=self._device)
        self._levels = torch.arange(self._length + 1, device=self._device)[:, None]

    def propose(self, step: StepView, out: Drafts) -> None:
        positions = step.positions
        hidden = self._forward(step, step.ids, step.rows, positions, positions + 1)[step.last]
        committed, vocabulary = step.committed_len, self._translation.vocabulary
        rows = self._rows[: len(committed)]
        places = committed + self._levels  # [levels + 1, B]
        chosen: list[torch.Tensor] = []
        out.lens.copy_(self._limits(step))
        width = 0 if all_drafted(out.lens, 0) else step.width
        for level in range(width):
            logits = self._translation.logits(self._decoder.logits(hidden))
            place = places[level]
            ids, _ = draw(step, logits, rows, place, 1, greedy=not self._draws, vocabulary=vocabulary)
            chosen.append(ids)
            if out.probs is not None:
                out.probs[:, level] = step.probs(logits, rows, place, ids, vocabulary=vocabulary)[:, 0]
            if level + 1 == width or all_drafted(out.lens, level + 1):
                break
            hidden = self._forward(step, ids[:, 0], rows, place, places[level + 1])
        if chosen:
            torch.cat(chosen, 1, out=out.ids[:, : len(chosen)])

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
        self,
        step: StepView,
        ids: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        base: torch.Tensor,
    ) -> torch.Tensor:
        """Hidden states ``[T, H]``; the entry of each token goes to the slot of its position.

        ``base``: ``positions + 1``.
        """
        meta = step.ctx(rows, positions, base)
        if self._context is not None:
            # Behind its context a row is fed for its neighbours' sake alone: nothing of it is drafted from.
            positions = positions.clamp(max=self._context - 1)
        hidden: torch.Tensor = self._decoder(self._translation.feed(ids), positions, meta, self._caches)[0]
        return hidden
