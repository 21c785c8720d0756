"""Ids and logits between the target's vocabulary and the draft's, on the device."""

from __future__ import annotations

import torch

from .vocabulary import Vocabulary

#: The logit of what is never drafted: no noise lifts it, its probability is 0, and sums stay finite where a
#: request allows nothing else.
NEVER = -1e30


class Translation:
    """A :class:`~.vocabulary.Vocabulary` as tensors; made once, so that a captured step finds it in place."""

    def __init__(self, vocabulary: Vocabulary, device: torch.device) -> None:
        drafts = torch.tensor(vocabulary.drafts, dtype=torch.int64)
        feeds = torch.tensor(vocabulary.feeds, dtype=torch.int64)
        count = len(drafts)
        numbers = torch.arange(count)
        self._feeds = None if torch.equal(feeds, numbers) else feeds.to(device)
        never = drafts < 0
        self._never = never.to(device) if bool(never.any()) else None
        # The same columns in the same order, as of a padded vocabulary, need no gathering.
        self._count = count
        self._prefix = self._columns = None
        if torch.equal(drafts[~never], numbers[~never]):
            self._prefix = int(numbers[~never].max()) + 1
        else:
            self._columns = drafts.clamp(min=0).to(device)

    def feed(self, ids: torch.Tensor) -> torch.Tensor:
        """``[T]`` int64 of the target -> what the draft is fed for them."""
        return ids if self._feeds is None else self._feeds[ids]

    def logits(self, logits: torch.Tensor) -> torch.Tensor:
        """``[T, draft's vocabulary] -> [T, target's]`` float32; :data:`NEVER` for what is never drafted."""
        if self._columns is not None:
            logits = logits[:, self._columns]
        elif logits.shape[1] != self._count:
            known = logits[:, : self._prefix]
            logits = torch.nn.functional.pad(known, (0, self._count - known.shape[1]), value=NEVER)
        return logits if self._never is None else logits.masked_fill(self._never, NEVER)
