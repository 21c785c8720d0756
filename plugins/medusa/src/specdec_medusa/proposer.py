"""The heads at work: one pass over the last hidden state fills a chain or a tree."""

from __future__ import annotations

import torch
from specdecode.contract import Drafts, Proposer, StepView, TargetHandle
from specdecode.heads.drawing import draw
from specdecode.heads.trees import FixedTree

from .loading import load_heads
from .planning import Plan

#: Logits made at a time, where one output layer serves all heads: 2^24 are 64 MiB.
_LOGITS = 1 << 24


class MedusaProposer(Proposer):
    """Head ``i`` guesses the token ``i + 1`` places behind the last one, whatever stands between.

    So the nodes of one level choose among the same tokens: the best of that head, by its ranks. Nothing is
    kept of a request, and nothing is fed but the hidden state whose logits gave the last token. All is on the
    device and static in shape.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def load(self, target: TargetHandle) -> None:
        plan, tree = self._plan, self._plan.topology
        self._heads = load_heads(plan.heads, tree.depth, target)
        self._tree = FixedTree(tree, target.device)
        ranks = torch.tensor(tree.ranks, dtype=torch.int64, device=target.device)
        #: ``[N]``: where each node's token stands among ``[depth, fanout]``.
        self._where = (self._tree.depths - 1) * tree.fanout + ranks
        self._levels = torch.arange(tree.depth, device=target.device)

    def propose(self, step: StepView, out: Drafts) -> None:
        topology, tree, vocabulary = self._plan.topology, self._tree, self._heads.draft_ids
        width, fanout = step.width, topology.fanout  # the first nodes, whose levels come in order
        if not width:
            return
        committed = step.committed_len
        depth = topology.depths[width - 1]
        states = self._heads(step.taps[0][step.last])
        batch = states.shape[0]
        all_rows = torch.arange(batch, device=states.device)
        chosen, laws = [], []
        count = self._heads_at_once(batch)
        for first in range(0, depth, count):
            levels = self._levels[first : min(first + count, depth)]
            rows = all_rows.repeat_interleave(levels.shape[0])
            at = (committed[:, None] + levels).flatten()
            logits = self._heads.logits(states[:, first : first + levels.shape[0]], first)
            ids, _ = draw(step, logits, rows, at, fanout, greedy=self._plan.greedy, vocabulary=vocabulary)
            chosen.append(ids.view(batch, -1, fanout))
            if out.probs is not None:
                told = step.probs(logits, rows, at, ids, vocabulary=vocabulary)
                laws.append(told.view(batch, -1, fanout, told.shape[-1]))
        where = self._where[:width]
        out.ids[:, :width] = torch.cat(chosen, 1).view(batch, -1)[:, where]
        if out.probs is not None:
            out.probs[:, :width] = torch.cat(laws, 1).flatten(1, 2)[:, where]
        out.parents[:] = tree.parents
        # No draft stands behind the longest context that the heads are to work on.
        room = torch.minimum(step.room, (self._plan.longest - committed).clamp(min=0))
        out.lens[:] = torch.minimum(step.budget, tree.lens_within(room))

    def _heads_at_once(self, batch: int) -> int:
        if not self._heads.one_output:
            return 1
        return max(1, _LOGITS // max(1, batch * self._plan.heads.vocab_size))
