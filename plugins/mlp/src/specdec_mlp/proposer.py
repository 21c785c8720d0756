"""The speculator at work: chains, fixed trees and trees that grow."""

from __future__ import annotations

import torch
from specdecode.contract import Drafts, Proposer, StepView, TargetHandle
from specdecode.heads.drawing import draw
from specdecode.heads.trees import FixedTree, fill, grow

from .loading import load_speculator
from .planning import Plan


class MlpSpeculatorProposer(Proposer):
    """Starts from the hidden state whose logits gave the last token, and from that token.

    It has no KV and keeps nothing of a request. All is on the device and static in shape.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._tree: FixedTree | None = None

    def load(self, target: TargetHandle) -> None:
        plan = self._plan
        self._speculator = load_speculator(plan.speculator, plan.needs.depth, target)
        if plan.topology is not None:
            self._tree = FixedTree(plan.topology, target.device)

    def propose(self, step: StepView, out: Drafts) -> None:
        _Drafting(self, step, out).run()


class _Drafting:
    """One step of a proposer."""

    def __init__(self, proposer: MlpSpeculatorProposer, step: StepView, out: Drafts) -> None:
        self._plan, self._speculator, self._tree = proposer._plan, proposer._speculator, proposer._tree
        self._step, self._out = step, out
        self._committed = step.committed_len
        self._rows = torch.arange(self._committed.shape[0], device=self._committed.device)
        # No draft stands behind the longest context that the speculator is to work on.
        self._room = torch.minimum(step.room, (self._plan.longest - self._committed).clamp(min=0))

    def run(self) -> None:
        step = self._step
        if not step.width:
            return
        state = self._speculator.enter(step.taps[0][step.last])
        state = self._speculator(0, state, step.last_token)
        if self._tree is not None:
            self._fixed(self._tree, state)
        elif self._plan.fanout is not None:
            self._grown(self._plan.fanout, state)
        else:
            self._chain(state)

    def _chain(self, state: torch.Tensor) -> None:
        depth = self._step.width
        for level in range(depth):
            ids, _, laws = self._children(level, state[:, None], 1)
            self._out.ids[:, level] = ids[:, 0, 0]
            if self._out.probs is not None and laws is not None:
                self._out.probs[:, level] = laws[:, 0, 0]
            if level + 1 < depth:
                state = self._speculator(level + 1, state, ids[:, 0, 0])
        self._out.lens[:] = torch.minimum(self._step.budget, self._room)

    def _fixed(self, tree: FixedTree, state: torch.Tensor) -> None:
        out, probs = self._out, self._out.probs

        def choose(level: int, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            ids, scores, laws = self._children(level, states, tree.fanout)
            if probs is not None and laws is not None:
                tree.place_laws(probs, level, laws)
            return ids, scores

        out.ids[:] = fill(tree, choose, self._expand, state, state)
        out.parents[:] = tree.parents
        out.lens[:] = torch.minimum(self._step.budget, tree.lens_within(self._room))

    def _grown(self, fanout: int, state: torch.Tensor) -> None:
        def choose(level: int, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self._children(level, states, fanout)[:2]

        grow(
            choose,
            self._expand,
            state,
            state,
            fanout=fanout,
            depth=min(self._plan.needs.depth, self._step.width),
            width=self._step.width,
            room=self._room,
            budget=self._step.budget,
            out=self._out,
        )

    def _children(
        self, level: int, states: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Ids and scores ``[B, n, count]`` of the best children of ``[B, n, D]`` nodes, and their laws."""
        batch, nodes, size = states.shape
        rows = self._rows.repeat_interleave(nodes)
        at = self._committed.repeat_interleave(nodes) + level
        logits = self._speculator.logits(level, states.reshape(batch * nodes, size).contiguous())
        ids, scores = draw(self._step, logits, rows, at, count, greedy=self._plan.greedy)
        laws = None
        if self._out.probs is not None:
            laws = self._step.probs(logits, rows, at, ids).view(batch, nodes, count, -1)
        return ids.view(batch, nodes, count), scores.view(batch, nodes, count), laws

    def _expand(
        self, level: int, ids: torch.Tensor, states: torch.Tensor, parents: torch.Tensor, _: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The states of the nodes of a level, from their parents': :data:`~specdecode.heads.trees.Expand`."""
        batch, nodes = ids.shape
        made = self._speculator(level, states.flatten(0, 1)[parents], ids.flatten())
        made = made.view(batch, nodes, -1)
        return made, made
