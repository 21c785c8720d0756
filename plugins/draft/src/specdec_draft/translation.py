"""Ids and logits between the target's vocabulary and the draft's, on the device."""

from __future__ import annotations

import torch

from .vocabulary import Vocabulary


class Translation:
    """A :class:`~.vocabulary.Vocabulary` as tensors; made once, so that a captured step finds it in place."""

    def __init__(self, vocabulary: Vocabulary, device: torch.device) -> None:
        drafts = torch.tensor(vocabulary.drafts, dtype=torch.int64)
        feeds = torch.tensor(vocabulary.feeds, dtype=torch.int64)
        numbers = torch.arange(len(drafts))
        self._feeds = None if torch.equal(feeds, numbers) else feeds.to(device)
        kept = (drafts >= 0).nonzero()[:, 0]
        own, places = drafts[kept], torch.arange(len(kept))
        #: ``[n]`` int64, the target's id of each column of :meth:`logits`; None: the columns' numbers
        self.vocabulary = None if torch.equal(kept, places) else kept.to(device)
        self._columns = None if torch.equal(own, places) else own.to(device)
        self._count = len(kept)

    def feed(self, ids: torch.Tensor) -> torch.Tensor:
        """``[T]`` int64 of the target -> what the draft is fed for them."""
        return ids if self._feeds is None else self._feeds[ids]

    def logits(self, logits: torch.Tensor) -> torch.Tensor:
        """``[T, draft's vocabulary] -> [T, n]``, of the tokens that can be drafted."""
        return logits[:, : self._count] if self._columns is None else logits[:, self._columns]
