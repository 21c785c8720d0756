"""The standard rule: accept a draft with probability min(1, p/q), else draw from the residual.

Leviathan, Kalman and Matias (arXiv 2211.17192), Chen et al. (arXiv 2302.01318). In a tree the
children of a node are tried one after the other, each against what its elders left of the target's
law: recursive rejection, as in SpecInfer (arXiv 2305.09781) for siblings drawn independently of each
other, and in Jeon et al. (arXiv 2402.14160) for siblings drawn without replacement.
"""

from __future__ import annotations

from .base import Weighed, WeighedDrafts, residual


def standard(drafts: WeighedDrafts) -> Weighed:
    """Walk down each row's chain or tree, trying each child of the node reached."""
    every = range(len(drafts.ids))
    reached = [-1 for _ in every]
    accepted: list[list[int]] = [[] for _ in every]
    left = drafts.law(every, reached)
    # One pass is enough: children come after their parent, so none of them has been passed yet.
    for node in range(max(map(len, drafts.ids), default=0)):
        tried = [row for row in every if tuple(drafts.parents[row][node : node + 1]) == (reached[row],)]
        if not tried:
            continue
        nodes = [node] * len(tried)
        p, tokens = left[tried], drafts.tokens(tried, nodes)
        q = drafts.drawn_from(tried, nodes, p.shape[-1])
        ratios = (p.gather(-1, tokens) / q.gather(-1, tokens))[:, 0]
        accepts = (drafts.chances[tried, node] < ratios).tolist()
        left[tried] = residual(p, q)
        taken = [row for row, accept in zip(tried, accepts, strict=True) if accept]
        for row in taken:
            reached[row] = node
            accepted[row].append(node)
        if taken:
            left[taken] = drafts.law(taken, [node] * len(taken))
    return Weighed([tuple(nodes) for nodes in accepted], left)
