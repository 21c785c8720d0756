"""What a rule of verification is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import attrs
import torch

from ..sampling.streams import Stream

if TYPE_CHECKING:
    from .synthetic import Synthetic


@attrs.frozen
class Verdict:
    """What a step adds to one request."""

    accepted: tuple[int, ...]  #: indices of the accepted nodes, from the root down
    tokens: tuple[int, ...]  #: their ids, and one more that the target drew after the last of them


class Compare(Protocol):
    """Decides one row by the tokens the target drew: no probabilities, no randomness."""

    def __call__(self, targets: Sequence[int], ids: Sequence[int], parents: Sequence[int]) -> Verdict: ...


#: ``law(rows, nodes)``: the target's law behind node ``nodes[i]`` of row ``rows[i]``, ``[N, V]`` float32
#: with sum 1, or all 0 where no token can be drawn. Node -1 is the row's last token.
Law = Callable[[Sequence[int], Sequence[int]], torch.Tensor]


@attrs.frozen(kw_only=True, eq=False)
class WeighedDrafts:
    """The drafts of ``B`` rows, and what a rule weighs them by."""

    ids: Sequence[Sequence[int]]  #: of each row the token of each node, at least one
    parents: Sequence[Sequence[int]]  #: and its parent, -1 = the row's last token, before its children
    #: ``[n, V]`` float32 of each row: the law that each node was drawn from, given the earlier siblings.
    #: None: the drafts are not random, each is a point mass.
    probs: Sequence[torch.Tensor | None]
    chances: torch.Tensor  #: ``[B, W]`` float32: a uniform number for each node
    law: Law

    def tokens(self, rows: Sequence[int], nodes: Sequence[int]) -> torch.Tensor:
        """``[N, 1]`` int64: the token of node ``nodes[i]`` of row ``rows[i]``."""
        ids = [[self.ids[row][node]] for row, node in zip(rows, nodes, strict=True)]
        return torch.tensor(ids, dtype=torch.int64, device=self.chances.device).reshape(-1, 1)

    def drawn_from(self, rows: Sequence[int], nodes: Sequence[int], vocab_size: int) -> torch.Tensor:
        """``[N, vocab_size]`` float32: the law of node ``nodes[i]`` of row ``rows[i]``."""
        laws = torch.zeros(len(rows), vocab_size, device=self.chances.device)
        laws.scatter_(-1, self.tokens(rows, nodes), 1.0)
        told = [
            (place, probs[node])
            for place, (row, node) in enumerate(zip(rows, nodes, strict=True))
            if (probs := self.probs[row]) is not None
        ]
        if told:
            places, own = zip(*told, strict=True)
            laws[list(places)] = torch.stack(own)
        return laws


@attrs.frozen(eq=False)
class Weighed:
    """What weighing gave each of ``B`` rows."""

    accepted: list[tuple[int, ...]]  #: the accepted nodes, from the root down
    left: torch.Tensor  #: ``[B, V]`` float32: the law of the token behind the last of them


class Weigh(Protocol):
    """Decides rows by the drafter's probabilities and the target's.

    ``accepted`` and ``left`` are functions of the drafts, the laws and the chances. Whatever the laws
    are, drafts drawn from theirs, independent uniform chances and a token drawn from ``left`` give the
    target's law.
    """

    def __call__(self, drafts: WeighedDrafts) -> Weighed: ...


@attrs.frozen(kw_only=True)
class Rule:
    """A rule of verification, and what the engine has to know of it."""

    name: str
    compare: Compare  #: for greedy rows and rows without drafts, where all rules are one
    weigh: Weigh | None = None  #: for the other rows; None: ``compare`` decides those too
    #: As ``weigh``, asking for the target's laws down the accepted path only: a request's logits
    #: processors must not be shown a draft that is rejected.
    weigh_in_order: Weigh | None = None
    trees: bool = True  #: whether it can decide trees
    #: Whether a draft that is passed over has been looked at, so that the next draft for its position
    #: must be drawn and judged by other noise.
    keyed_by_base: bool = False
    #: Whether drafters share the target's noise though this rule weighs: it looks at the target's law alone.
    shares_noise: bool = False
    #: Whether the output has the target's own law; else it is marked by the rule's name.
    lossless: bool = True
    #: Accept by these rates, whatever the tokens: the output is nobody's.
    synthetic: Synthetic | None = None

    @property
    def mark(self) -> str | None:
        """What outputs, metrics and rows of benchmarks are marked by, where the law is not the target's."""
        return None if self.lossless else self.name

    def stream(self, stream: Stream, base: int) -> int:
        """The stream of a draft, or of its acceptance, in a step that drafts from position ``base`` on.

        A rule that compares has its drafters share the target's noise.
        """
        if self.weigh is None or self.shares_noise:
            return Stream.TARGET
        return stream.keyed(base if self.keyed_by_base else None)


def residual(p: torch.Tensor, q: torch.Tensor, weight: torch.Tensor | float = 1.0) -> torch.Tensor:
    """What is left to draw when a draft from ``q`` was rejected: the positive part of ``weight * p - q``.

    Args:
        p, q: ``[N, V]`` float32.
        weight: ``[N, 1]`` float32, or one for all.

    Returns:
        ``[N, V]`` float32 with sum 1; ``p`` where nothing is left, as rounding may have it.
    """
    left = (weight * p - q).clamp_(min=0)
    scaled = left.log().softmax(dim=-1)  # which sums each row alone, in any batch
    return torch.where(left.amax(dim=-1, keepdim=True) > 0, scaled, p)
