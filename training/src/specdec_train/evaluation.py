"""Held-out acceptance: what the trained module drafts behind every token, against what the target wrote."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import torch

from .corpus import Corpus
from .packing import pack
from .recipe import Batch, Trainee


@attrs.frozen(kw_only=True)
class Acceptance:
    """Of greedy drafts on greedy answers."""

    per_position: tuple[float, ...]  #: share of the drafts of which so many and one more are accepted
    length: float  #: mean tokens a step, the target's own counted, walking through the answers

    def describe(self) -> str:
        shares = " ".join(f"{share:.2f}" for share in self.per_position)
        return f"acceptance length {self.length:.2f} [{shares}]"


class HeldOut:
    """The held-out texts, packed once."""

    def __init__(self, corpus: Corpus, *, row_tokens: int, batch_rows: int, depth: int) -> None:
        texts = corpus.texts
        chosen = np.flatnonzero(texts.held_out & texts.greedy)
        self._rows = pack(texts, chosen, row_tokens, corpus.device, rows_multiple=batch_rows)
        self._corpus, self._batch_rows, self._depth = corpus, batch_rows, depth

    def evaluate(self, trainee: Trainee, autocast: Any) -> Acceptance:
        """Draft behind every token at once: in a text that is accepted the true tokens are the drafts."""
        right, starts = [], []
        with torch.no_grad(), autocast:
            for first in range(0, len(self._rows), self._batch_rows):
                batch = self._corpus.batch(self._rows, slice(first, first + self._batch_rows))
                right.append(accepted(batch, trainee.drafts(batch, self._depth)).cpu().numpy())
                starts.append(_starts(batch).cpu().numpy())
        return _acceptance(np.concatenate(right), np.concatenate(starts), self._depth)


def accepted(batch: Batch, drafts: torch.Tensor) -> torch.Tensor:
    """``[B, T]`` int64: how many of ``drafts`` ``[B, T, D]``, from the first on, stand behind each token."""
    good = torch.ones_like(batch.answer)
    count = torch.zeros_like(batch.ids)
    for level in range(drafts.shape[-1]):
        there = batch.wanted(level + 1)
        good = good & there & (drafts[..., level] == batch.later(batch.ids, level + 1))
        count += good
    return count


def _starts(batch: Batch) -> torch.Tensor:
    """Tokens behind which a step may draft: of an answer, with another one behind."""
    return batch.answer & batch.wanted(1) & batch.same(-1)


def _acceptance(counts: np.ndarray, starts: np.ndarray, depth: int) -> Acceptance:
    """Walk through each answer as decoding does: a step gives the accepted drafts and one token more."""
    steps: list[int] = []
    for count, start in zip(counts.tolist(), starts.tolist(), strict=True):
        at = 0
        while at < len(start):
            if start[at]:
                steps.append(count[at])
                at += count[at]
            at += 1
    taken = np.asarray(steps or [0])
    return Acceptance(
        per_position=tuple(float((taken > level).mean()) for level in range(depth)),
        length=float(taken.mean()) + 1.0,
    )
