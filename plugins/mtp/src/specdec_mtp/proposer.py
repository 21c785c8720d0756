"""The modules at work: module ``k`` drafts token ``k``, the last one all that are left."""

from __future__ import annotations

import logging

import torch
from specdec_kernels.attention import AttentionMetadata
from specdec_kernels.kv_write import write_kv
from specdecode.contract import LM_HEAD, Drafts, Proposer, Resources, StepView, TargetHandle, TargetUpdate
from specdecode.heads.drawing import draw
from specdecode.layers import KVCache

from .module import load_modules, reload_modules
from .planning import Plan

logger = logging.getLogger(__name__)


class MtpProposer(Proposer):
    """Feeds every module what the target computed, then the drafts to those that follow.

    Entry ``j`` of module ``k`` is of token ``j`` and of the hidden state that module ``k - 1`` (the target
    for the first) made of token ``j - 1``: slot ``j``, rope position ``j - 1``. What drafting writes is
    overwritten by the next feed. All is on the device and static in shape; nothing is kept of a request
    beside its slots.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def load(self, target: TargetHandle) -> None:
        self._modules = load_modules(self._plan.spec, self._plan.modules, target)
        self._logits = target.modules[LM_HEAD]

    def bind(self, resources: Resources) -> None:
        count = self._plan.modules
        self._caches: list[KVCache] = [resources.kv[module][0] for module in range(count)]
        self._handed = [HandedStates(cache) for cache in (resources.kv[count] if count > 1 else ())]

    def on_target_updated(self, update: TargetUpdate) -> None:
        if not reload_modules(self._modules, self._plan.spec, update):
            logger.warning("the target's new weights hold no modules that predict tokens: the old ones go on")

    def propose(self, step: StepView, out: Drafts) -> None:
        _Drafting(self, step, out).run()


class HandedStates:
    """What a module made of each token, in pages of core's like keys and values: two halves of ``[T, H]``."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._half = cache[0].shape[-1]

    def write(self, hidden: torch.Tensor, meta: AttentionMetadata) -> None:
        """Keep ``[T, H]`` of the step's tokens."""
        first, second = hidden[:, None, : self._half], hidden[:, None, self._half :]
        write_kv(first.contiguous(), second.contiguous(), *self._cache, meta.write_slots)

    def read(self, positions: torch.Tensor, meta: AttentionMetadata) -> torch.Tensor:
        """``[T, H]`` of the tokens at ``positions`` ``[T]`` of the rows of ``meta``."""
        size = meta.block_size
        slots = meta.block_table[meta.rows, positions // size] * size + positions % size
        return torch.cat([half.flatten(0, 1)[slots, 0] for half in self._cache], dim=-1)


class _Drafting:
    """One step."""

    def __init__(self, proposer: MtpProposer, step: StepView, out: Drafts) -> None:
        self._plan, self._modules, self._caches = proposer._plan, proposer._modules, proposer._caches
        self._handed, self._logits = proposer._handed, proposer._logits
        self._step, self._out = step, out
        self._committed = step.committed_len
        self._rows = torch.arange(self._committed.shape[0], device=self._committed.device)

    def run(self) -> None:
        step, out = self._step, self._out
        states, handed = self._feed()
        # Of drafted tokens the hidden states [B, n, H] that the module before gave, from the last fed one on.
        hidden = handed[0][:, None]
        for level in range(step.width):
            if level:
                states, made = self._extend(level, hidden)
                chained = level + 1 < self._plan.modules  # the next module has seen none of the drafts
                hidden = torch.cat((handed[level][:, None], made), dim=1) if chained else made[:, -1:]
            logits, at = self._logits(states), self._committed + level
            ids, _ = draw(step, logits, self._rows, at, 1, greedy=self._plan.greedy)
            out.ids[:, level] = ids[:, 0]
            if out.probs is not None:
                out.probs[:, level] = step.probs(logits, self._rows, at, ids)[:, 0]
        # No draft stands behind the longest context that is to be drafted for.
        room = torch.minimum(step.room, (self._plan.longest - self._committed).clamp(min=0))
        out.lens[:] = torch.minimum(step.budget, room)

    def _feed(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Give all modules the step's tokens.

        Returns:
            ``[B, H]`` of each row's last token: what the first module's logits are made of, and what each
            module hands on.
        """
        step = self._step
        ids, positions, rows, last = step.ids, step.positions, step.rows, step.last
        before = (positions - 1).clamp(min=0)
        hidden, firsts, handed = step.taps[0], [], []
        for number, module in enumerate(self._modules):
            context = step.ctx(rows, positions, positions + 1, kv=number)
            states, stream = module(ids, hidden, before, context, self._caches[number])
            made = stream if self._plan.raw else states
            firsts.append(states[last])
            handed.append(made[last])
            if number < len(self._handed):
                pages = step.ctx(rows, positions, positions + 1, kv=self._plan.modules)
                self._handed[number].write(made, pages)
                hidden = self._handed[number].read(before, pages)
                # Before a module's first entry there is nothing to hand on; what is made of it is masked.
                hidden = hidden.masked_fill((before <= number)[:, None], 0.0)
        return firsts[0], handed

    def _extend(self, level: int, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Give the module of ``level`` the drafts that it has not seen.

        Args:
            hidden: ``[B, n, H]``, of the token before each of them.

        Returns:
            ``[B, H]`` that the next logits are made of, and ``[B, n, H]`` that the module hands on.
        """
        step, (batch, count, size) = self._step, hidden.shape
        number = min(level, self._plan.modules - 1)
        ids = self._out.ids[:, level - count : level]
        offsets = torch.arange(level - count, level, device=ids.device)
        at = (self._committed[:, None] + offsets).flatten()
        context = step.ctx(self._rows.repeat_interleave(count), at, at + 1, kv=number)
        states, stream = self._modules[number](
            ids.flatten(),
            hidden.reshape(batch * count, size),
            (at - 1).clamp(min=0),
            context,
            self._caches[number],
        )
        made = stream if self._plan.raw else states
        return states.view(batch, count, size)[:, -1], made.view(batch, count, size)
