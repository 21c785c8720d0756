"""Drafts of a child and those of the combination, as torch tensors on one device.

Legend: ``B`` rows, ``W`` nodes of the combination, ``w`` of a child, ``V`` vocabulary. All is static in shape
and waits for nobody where the combination works on the device.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch
from specdecode.contract import Drafts


@attrs.frozen(eq=False)
class Rows:
    """The buffers of :class:`~specdecode.contract.Drafts` as tensors; numpy arrays share their memory."""

    ids: torch.Tensor
    lens: torch.Tensor
    parents: torch.Tensor
    score: torch.Tensor
    probs: torch.Tensor | None

    @classmethod
    def of(cls, drafts: Drafts, like: Any) -> Rows:
        """``drafts`` where ``like`` is, with no length below 0 or above the width."""
        device = like.device if isinstance(like, torch.Tensor) else torch.device("cpu")
        ids, lens, parents, score = (
            torch.as_tensor(value).to(device)
            for value in (drafts.ids, drafts.lens, drafts.parents, drafts.score)
        )
        probs = None if drafts.probs is None else torch.as_tensor(drafts.probs).to(device)
        return cls(ids, lens.clamp(0, ids.shape[1]), parents, score, probs)

    @property
    def width(self) -> int:
        return self.ids.shape[1]

    def laws(self, vocab_size: int) -> torch.Tensor:
        """``[B, w, V]``: what it told, or for each node the law that always gives its token."""
        if self.probs is not None:
            return self.probs
        tokens = self.ids.clamp(0, vocab_size - 1)  # what lies outside core drops, whatever its law
        return torch.zeros(*tokens.shape, vocab_size, device=tokens.device).scatter_(
            -1, tokens[..., None], 1.0
        )

    def present(self) -> torch.Tensor:
        """``[B, w]`` bool: which nodes there are."""
        return torch.arange(self.width, device=self.lens.device) < self.lens[:, None]


class Output:
    """The combination's own buffers."""

    def __init__(self, out: Drafts) -> None:
        self._ids, self._lens, self._parents, self._score = (
            torch.as_tensor(value) for value in (out.ids, out.lens, out.parents, out.score)
        )
        self._probs = None if out.probs is None else torch.as_tensor(out.probs)

    @property
    def weighed(self) -> bool:
        """Whether laws are told."""
        return self._probs is not None

    def take(self, rows: Rows, chosen: torch.Tensor) -> None:
        """Make ``rows`` the drafts of those ``chosen`` ``[B]`` bool."""
        pairs = [
            (self._ids, rows.ids),
            (self._lens, rows.lens),
            (self._parents, rows.parents),
            (self._score, rows.score),
        ]
        if self._probs is not None:
            pairs.append((self._probs, rows.laws(self._probs.shape[-1])))
        for mine, theirs in pairs:
            own = mine if mine.dim() == 1 else mine[:, : rows.width]
            own.copy_(torch.where(chosen.view(-1, *[1] * (own.dim() - 1)), theirs, own))

    def append(self, rows: Rows, ends: torch.Tensor, chance: torch.Tensor) -> None:
        """Hang ``rows`` on node ``ends - 1`` ``[B]`` of each row, which has a ``chance`` ``[B]`` itself."""
        places = ends[:, None] + torch.arange(rows.width, device=ends.device)
        self._ids.scatter_(1, places, rows.ids)
        self._parents.scatter_(1, places, rows.parents + ends[:, None])
        self._score.scatter_(1, places, rows.score * chance[:, None])
        self._lens.copy_(ends + rows.lens)
        if self._probs is not None:
            laws = rows.laws(self._probs.shape[-1])
            self._probs.scatter_(1, places[..., None].expand_as(laws), laws)

    def chance(self, ends: torch.Tensor) -> torch.Tensor:
        """``[B]`` float32: the score of node ``ends - 1``; 1 where there is none."""
        own = self._score.gather(1, (ends - 1).clamp(min=0)[:, None])[:, 0]
        return torch.where(ends > 0, own, 1.0)

    def drafts(self, lens: torch.Tensor) -> Drafts:
        """What stands there, as chains of ``lens``, to be gone on from."""
        return Drafts(ids=self._ids.clone(), lens=lens, parents=None, score=None)


def emptied(drafts: Drafts) -> None:
    """Take back what a child wrote."""
    drafts.lens[:] = 0


def as_given(tensor: torch.Tensor, like: Any) -> Any:
    """``tensor`` in the form of ``like``: a numpy array of the same memory, or itself."""
    return tensor if isinstance(like, torch.Tensor) else tensor.numpy()
