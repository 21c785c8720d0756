"""Typical acceptance: a draft is accepted where the target finds it likely enough, whatever it would draw.

Cai et al. (Medusa, arXiv 2401.10774, section 2.3.1), after the truncation of Hewitt et al. (arXiv
2210.15191). It is lossy: accepted drafts are what the drafter wrote, among tokens that are not unlikely.
Greedy requests are decided by equality, as under every rule.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from .base import Weighed, WeighedDrafts

#: The authors' values of both, the second the root of the first.
DEFAULT_THRESHOLD = 0.09
DEFAULT_ALPHA = 0.3
_TINY = 1e-5  # theirs, within the logarithm


@attrs.frozen
class Typical:
    """A draft is kept if its probability is above ``min(threshold, alpha * exp(-entropy))``.

    Probability and entropy are of the target's law behind the draft's parent, after all that the request's
    parameters do to it; so what they exclude is never kept. Where the law is flat, less is asked for.
    """

    threshold: float = DEFAULT_THRESHOLD
    alpha: float = DEFAULT_ALPHA

    def keeps(self, law: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Whether each draft is typical, ``[N]`` bool, and its probability ``[N]`` float32.

        Args:
            law: ``[N, V]`` float32.
            tokens: ``[N, 1]`` int64.
        """
        entropy = -(law * (law + _TINY).log()).sum(dim=-1)
        chance = law.gather(-1, tokens)[:, 0]
        return chance > (self.alpha * (-entropy).exp()).clamp(max=self.threshold), chance

    def weigh(self, drafts: WeighedDrafts) -> Weighed:
        """The longest path of typical drafts of each row; of equally long ones the likeliest."""
        every = range(len(drafts.ids))
        rows = [row for row in every for _ in drafts.ids[row]]
        nodes = [node for row in every for node in range(len(drafts.ids[row]))]
        parents = [parent for row in every for parent in drafts.parents[row]]
        keeps, chances = self.keeps(drafts.law(rows, parents), drafts.tokens(rows, nodes))
        told = iter(zip(keeps.tolist(), chances.log().tolist(), strict=True))
        accepted = [_longest(parents, [next(told) for _ in parents]) for parents in drafts.parents]
        return Weighed(accepted, drafts.law(every, [path[-1] if path else -1 for path in accepted]))

    def weigh_in_order(self, drafts: WeighedDrafts) -> Weighed:
        """The first typical child of each node, so that laws are asked for down the accepted path alone."""
        every = range(len(drafts.ids))
        reached = [-1 for _ in every]
        accepted: list[list[int]] = [[] for _ in every]
        left = drafts.law(every, reached)
        # One pass is enough: children come after their parent, so none of them has been passed yet.
        for node in range(max(map(len, drafts.ids), default=0)):
            tried = [row for row in every if tuple(drafts.parents[row][node : node + 1]) == (reached[row],)]
            if not tried:
                continue
            keeps, _ = self.keeps(left[tried], drafts.tokens(tried, [node] * len(tried)))
            taken = [row for row, keep in zip(tried, keeps.tolist(), strict=True) if keep]
            for row in taken:
                reached[row] = node
                accepted[row].append(node)
            if taken:
                left[taken] = drafts.law(taken, [node] * len(taken))
        return Weighed([tuple(nodes) for nodes in accepted], left)


def _longest(parents: Sequence[int], judged: Sequence[tuple[bool, float]]) -> tuple[int, ...]:
    """The deepest path of nodes that are all kept, by their log-probabilities where several are."""
    paths: dict[int, tuple[int, ...]] = {-1: ()}
    sums = {-1: 0.0}
    for node, (parent, (keep, chance)) in enumerate(zip(parents, judged, strict=True)):
        if keep and parent in paths:
            paths[node] = (*paths[parent], node)
            sums[node] = sums[parent] + chance
    return paths[max(paths, key=lambda node: (len(paths[node]), sums[node], -node))]
