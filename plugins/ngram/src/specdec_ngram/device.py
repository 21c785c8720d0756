"""Prompt lookup where the target is: the text is searched in place, and nothing comes to the host."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from specdec_kernels.matching import match_ngrams
from specdecode.contract import Drafts, Proposer, StepView, TargetHandle

from .config import NgramConfig
from .proposer import CHANCES


class DeviceNgramProposer(Proposer):
    """Drafts what :class:`~specdec_ngram.proposer.NgramProposer` drafts, without an index.

    A device reads a whole text faster than a host looks into an index: 4 bytes a token, 64 KiB for 16 Ki
    tokens. So there is no state that requests could leave behind, and the step can be captured.
    """

    def __init__(self, config: NgramConfig) -> None:
        self._shortest, self._longest = config.windows
        self._counts = torch.zeros(2, dtype=torch.int64)  # lookups and hits
        self._chances = torch.tensor((0.0, *CHANCES))
        self._powers = torch.arange(1, config.num_speculative_tokens + 1)

    def load(self, target: TargetHandle) -> None:
        self._counts, self._chances, self._powers = (
            kept.to(target.device) for kept in (self._counts, self._chances, self._powers)
        )

    def propose(self, step: StepView, out: Drafts) -> None:
        limits = torch.minimum(step.budget, step.room)
        ids, lens, windows = match_ngrams(
            step.history,
            step.committed_len,
            shortest=self._shortest,
            longest=self._longest,
            width=out.ids.shape[1],
            limits=limits,
        )
        out.ids.copy_(ids)
        out.lens.copy_(lens)
        chance = self._chances[windows.clamp(max=len(self._chances) - 1)]
        out.score.copy_(chance[:, None] ** self._powers)
        self._counts += (torch.stack((limits, lens)) > 0).sum(dim=1)

    def metrics(self) -> Mapping[str, float]:
        """Reading them waits for the device; nothing else does."""
        lookups, hits = self._counts.tolist()
        return {"lookups": float(lookups), "hits": float(hits)}
