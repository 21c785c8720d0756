"""The head at work: chains, fixed trees and trees that grow."""

from __future__ import annotations

import torch
from specdec_kernels.sampling import top_scores
from specdecode.contract import Drafts, Proposer, Resources, StepView, TargetHandle

from .loading import load_head
from .planning import Plan
from .trees import FixedTree, fill, grow


class EagleProposer(Proposer):
    """Feeds the head what the target computed, then the head with its own features.

    Entry ``j`` is of token ``j`` and the target's hidden state at ``j - 1``: slot ``j``, rope position
    ``j - 1``. What drafting writes is overwritten by the next feed, with true hidden states. All is on the
    device and static in shape; nothing is kept of a request.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        taps = [tap.boundary for tap in plan.needs.taps]
        self._order = [taps.index(boundary) for boundary in plan.head.boundaries]
        self._tree: FixedTree | None = None

    def load(self, target: TargetHandle) -> None:
        self._head = load_head(self._plan.head, target)
        if self._plan.topology is not None:
            self._tree = FixedTree(self._plan.topology, target.device)

    def bind(self, resources: Resources) -> None:
        self._caches = resources.kv[0]

    def propose(self, step: StepView, out: Drafts) -> None:
        positions, taps = step.positions, step.taps
        feature, states = self._head(
            step.ids,
            self._head.fuse([taps[index] for index in self._order]),
            (positions - 1).clamp(min=0),
            step.ctx(step.rows, positions, positions + 1),
            self._caches,
        )
        last = step.last
        _Drafting(self, step, out).run(feature[last], states[last])


class _Drafting:
    """One step of a proposer, behind its feed."""

    def __init__(self, proposer: EagleProposer, step: StepView, out: Drafts) -> None:
        self._plan, self._head, self._caches = proposer._plan, proposer._head, proposer._caches
        self._tree = proposer._tree
        self._step, self._out = step, out
        self._committed = step.committed_len
        self._rows = torch.arange(self._committed.shape[0], device=self._committed.device)
        # No draft stands behind the longest context that the head is to work on.
        self._room = torch.minimum(step.room, (self._plan.longest - self._committed).clamp(min=0))

    def run(self, feature: torch.Tensor, states: torch.Tensor) -> None:
        """``feature`` and ``states`` ``[B, H]`` of each row's last token."""
        if self._tree is not None:
            self._fixed(self._tree, feature, states)
        elif self._plan.fanout is not None:
            self._grown(self._plan.fanout, feature, states)
        else:
            self._chain(feature, states)

    # -- three shapes ---------------------------------------------------------------------------
    def _chain(self, feature: torch.Tensor, states: torch.Tensor) -> None:
        step, out, rows, threshold = self._step, self._out, self._rows, self._plan.threshold
        depth = self._plan.needs.depth
        lens = torch.minimum(step.budget, self._room)
        sure = torch.zeros(rows.shape[0], device=rows.device)  # log of the confidence so far
        for level in range(depth):
            logits = self._head.logits(states)
            at = self._committed + level
            ids, _ = self._choose(logits, rows, at, 1)
            out.ids[:, level] = ids[:, 0]
            if out.probs is not None:
                out.probs[:, level] = step.probs(logits, rows, at, ids)[:, 0]
            if threshold is not None:
                # Whether a token is drafted was settled by those before it: what is drawn stays.
                lens = torch.where(sure.exp() < threshold, lens.clamp(max=level), lens)
                chosen = logits.gather(1, ids)[:, 0] - logits.logsumexp(-1)
                sure = sure + chosen
                out.score[:, level] = sure.exp()
            if level + 1 < depth:
                context = step.ctx(rows, at, at + 1)
                feature, states = self._head(ids[:, 0], feature, (at - 1).clamp(min=0), context, self._caches)
        out.lens[:] = lens

    def _fixed(self, tree: FixedTree, feature: torch.Tensor, states: torch.Tensor) -> None:
        out, probs = self._out, self._out.probs

        def choose(level: int, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            ids, scores, laws = self._children(level, states, tree.fanout, tell=probs is not None)
            if probs is not None and laws is not None:
                if level:
                    at = tree.levels[level - 1]
                    probs[:, at.children] = laws[:, at.parents, at.ranks]
                else:
                    probs[:, tree.first] = laws[:, 0, tree.first_ranks]
            return ids, scores

        out.ids[:] = fill(tree, choose, self._expand, feature, states)
        out.parents[:] = tree.parents
        out.lens[:] = torch.minimum(self._step.budget, tree.lens_within(self._room))

    def _grown(self, fanout: int, feature: torch.Tensor, states: torch.Tensor) -> None:
        def choose(level: int, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self._children(level, states, fanout, tell=False)[:2]

        grown = grow(
            choose,
            self._expand,
            feature,
            states,
            fanout=fanout,
            depth=self._plan.needs.depth,
            width=self._plan.needs.width,
            room=self._room,
        )
        count = grown.ids.shape[1]
        self._out.ids[:, :count] = grown.ids
        self._out.parents[:, :count] = grown.parents
        self._out.lens[:] = torch.minimum(self._step.budget, grown.lens)

    # -- one level ------------------------------------------------------------------------------
    def _choose(
        self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``[T, count]`` ids and scores: with the target's noise, or the head's best tokens."""
        if not self._plan.greedy:
            return self._step.sample(logits, rows, positions, count)
        ids, best = top_scores(logits, count)
        return ids, best - logits.logsumexp(-1, keepdim=True)

    def _children(
        self, level: int, states: torch.Tensor, count: int, *, tell: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Ids and scores ``[B, n, count]`` of the best children of ``[B, n, H]`` nodes, and their laws."""
        batch, nodes, hidden = states.shape
        rows = self._rows.repeat_interleave(nodes)
        at = self._committed.repeat_interleave(nodes) + level
        logits = self._head.logits(states.reshape(batch * nodes, hidden))
        ids, scores = self._choose(logits, rows, at, count)
        laws = self._step.probs(logits, rows, at, ids).view(batch, nodes, count, -1) if tell else None
        return ids.view(batch, nodes, count), scores.view(batch, nodes, count), laws

    def _expand(
        self, level: int, ids: torch.Tensor, feature: torch.Tensor, paths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The head's forward of the nodes of a level, in scratch slots; see :data:`trees.Expand`."""
        batch, nodes = ids.shape
        rows = self._rows.repeat_interleave(nodes)
        committed = self._committed.repeat_interleave(nodes)
        scratch = committed[:, None] + paths.reshape(batch * nodes, level)
        made, states = self._head(
            ids.flatten(),
            feature.reshape(batch * nodes, -1),
            (committed + level - 2).clamp(min=0),
            self._step.ctx(rows, scratch[:, -1], committed, scratch),
            self._caches,
        )
        shape = (batch, nodes, -1)
        return made.view(shape), states.view(shape)
