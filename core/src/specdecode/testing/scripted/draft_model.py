"""A draft model with KV layers of its own: the target's copy, its first layers, or another checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...contract import Drafts, Proposer, Resources, StepView, TargetHandle

if TYPE_CHECKING:
    from ...models import Decoder


class DraftModelProposer(Proposer):
    """A decoder fed with the committed tokens, then with its own, one level a forward.

    It draws with the target's noise, so a copy of the target is always right; under a rule that weighs
    probabilities it tells them, so that a copy is always accepted. All rows are drafted
    for, those without a budget too: nothing here waits for the device.
    """

    def __init__(self, path: str, num_layers: int | None) -> None:
        self._path = path
        self._num_layers = num_layers

    def load(self, target: TargetHandle) -> None:
        from ...models import load_model, resolve_model

        decoder: Any = load_model(
            resolve_model(self._path),
            dtype=target.dtype,
            device=target.device,
            max_model_len=target.info.max_model_len,
        )
        if self._num_layers is not None:
            decoder.layers = decoder.layers[: self._num_layers]
        self._decoder: Decoder = decoder

    def bind(self, resources: Resources) -> None:
        self._caches: Sequence[tuple[Any, Any]] = resources.kv[0]

    def propose(self, step: StepView, out: Drafts) -> None:
        positions = step.positions
        hidden = self._forward(step, step.ids, positions, step.rows, positions)[step.last]
        committed = step.committed_len
        rows = torch.arange(len(committed), device=committed.device)
        for level in range(step.width):
            logits = self._decoder.compute_logits(hidden)
            ids, _ = step.sample(logits, rows, committed + level)
            out.ids[:, level] = ids[:, 0]
            if out.probs is not None:
                out.probs[:, level] = step.probs(logits, rows, committed + level, ids)[:, 0]
            if level + 1 < step.width:
                hidden = self._forward(step, ids[:, 0], committed + level, rows, committed + level)
        out.lens[:] = torch.minimum(step.budget, step.room)

    def _forward(self, step: StepView, ids: Any, positions: Any, rows: Any, slots: Any) -> torch.Tensor:
        """Hidden states ``[T, H]``; entry of each token in the slot of its position."""
        meta = step.ctx(rows, slots, slots + 1)
        hidden, _ = self._decoder(ids, positions, meta, self._caches)
        return hidden
