"""The head at work: chains, fixed trees and trees that grow."""

from __future__ import annotations

import logging

import torch
from specdec_kernels.projection import gather
from specdecode.contract import Drafts, Proposer, Resources, StepView, TargetHandle, TargetUpdate
from specdecode.heads.drawing import draw
from specdecode.heads.sizing import choose_nodes, expected_gains
from specdecode.heads.stopping import all_drafted
from specdecode.heads.trees import FixedTree, fill, grow

from .loading import load_head, refresh
from .planning import Plan

logger = logging.getLogger(__name__)


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
        plan, device = self._plan, target.device
        self._head = load_head(plan.head, target)
        self._levels = torch.arange(plan.needs.depth + 1, device=device)[:, None]
        #: Where drafts end before the target does; None: they do not.
        self._longest = plan.longest if plan.longest < target.info.max_model_len else None
        self._column: torch.Tensor | None = None
        if plan.threshold is not None and (kept := self._head.draft_ids) is not None:
            self._column = torch.zeros(target.info.vocab_size, dtype=torch.int64, device=device)
            self._column[kept] = torch.arange(len(kept), device=device)
        if self._plan.topology is not None:
            self._tree = FixedTree(self._plan.topology, target.device)

    def bind(self, resources: Resources) -> None:
        plan, self._caches = self._plan, resources.kv[0]
        if plan.by_cost and plan.fanout is not None and resources.costs is not None:
            needs = plan.needs
            self.most = choose_nodes(resources.costs, expected_gains(plan.fanout, needs.depth, needs.width))
            logger.info("a tree of %d nodes is expected to be fastest on this device", self.most)
        rows = torch.arange(resources.max_num_seqs, device=self._levels.device)
        sizes = {1, plan.fanout or 1}
        if self._tree is not None:
            sizes.update(len(level.inner) for level in self._tree.levels)
        #: Nodes a row -> the row of each node.
        self._rows = {nodes: rows.repeat_interleave(nodes) for nodes in sizes}

    def on_target_updated(self, update: TargetUpdate) -> None:
        refresh(self._head)

    def propose(self, step: StepView, out: Drafts) -> None:
        positions, taps, last = step.positions, step.taps, step.last
        wanted = last if step.width else last[:0]  # whoever may draft nothing is fed, and no more
        feature, states = self._head(
            step.ids,
            self._head.fuse([taps[index] for index in self._order]),
            positions,
            step.ctx(step.rows, positions, positions + 1),
            self._caches,
            wanted=wanted,
        )
        if step.width:
            _Drafting(self, step, out).run(feature, states, last)


class _Drafting:
    """One step of a proposer, behind its feed."""

    def __init__(self, proposer: EagleProposer, step: StepView, out: Drafts) -> None:
        self._plan, self._head, self._caches = proposer._plan, proposer._head, proposer._caches
        self._tree = proposer._tree
        self._step, self._out = step, out
        self._committed = step.committed_len
        self._column = proposer._column
        self._rows = {nodes: rows[: nodes * len(self._committed)] for nodes, rows in proposer._rows.items()}
        self._places = self._committed + proposer._levels  # [depth + 1, B]: of the tokens of each level
        self._nodes_places = {1: self._places}
        self._room = step.room
        if proposer._longest is not None:
            left = (proposer._longest - self._committed).clamp(min=0)
            self._room = torch.minimum(self._room, left)

    def run(self, feature: torch.Tensor, states: torch.Tensor, last: torch.Tensor) -> None:
        """``feature`` ``[F, H]`` of all tokens fed, ``states`` ``[B, H]`` of the rows' last: ``last``."""
        if self._tree is not None:
            self._fixed(self._tree, gather((feature,), last), states)
        elif self._plan.fanout is not None:
            self._grown(self._plan.fanout, gather((feature,), last), states)
        else:
            self._chain(feature, states, last)

    # -- three shapes ---------------------------------------------------------------------------
    def _chain(self, feature: torch.Tensor, states: torch.Tensor, last: torch.Tensor) -> None:
        step, out, rows, threshold = self._step, self._out, self._rows[1], self._plan.threshold
        vocabulary = self._head.draft_ids
        torch.minimum(step.budget, self._room, out=out.lens)
        depth = 0 if all_drafted(out.lens, 0) else step.width
        sure: torch.Tensor | None = None  # log of the confidence so far
        places = self._places
        drawn: list[torch.Tensor] = []
        which: torch.Tensor | None = last
        for level in range(depth):
            logits, at = self._head.logits(states), places[level]
            ids, _ = self._choose(logits, rows, at, 1)
            drawn.append(ids)
            if out.probs is not None:
                out.probs[:, level] = step.probs(logits, rows, at, ids, vocabulary=vocabulary)[:, 0]
            if threshold is not None:
                chosen = self._log_probability(logits, ids)
                sure = chosen if sure is None else sure + chosen
                confidence = sure.exp()
                out.score[:, level] = confidence
                # What is drawn stays, whatever it is: only whether others come behind it is settled by it.
                last_ones = out.lens.clamp(max=level + 1)
                out.lens.copy_(torch.where(confidence < threshold, last_ones, out.lens))
            if level + 1 == depth or all_drafted(out.lens, level + 1):
                break
            context = step.ctx(rows, at, places[level + 1])
            feature, states = self._head(ids[:, 0], feature, at, context, self._caches, rows=which)
            which = None
        if drawn:
            torch.cat(drawn, 1, out=out.ids[:, : len(drawn)])

    def _log_probability(self, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """``[B]``, of the head's law, of ids ``[B, 1]``."""
        column = ids if self._column is None else self._column[ids]
        return logits.float().log_softmax(-1).gather(1, column)[:, 0]

    def _fixed(self, tree: FixedTree, feature: torch.Tensor, states: torch.Tensor) -> None:
        out, probs, width = self._out, self._out.probs, min(self._step.width, len(tree))
        if all_drafted(self._step.budget, 0):
            out.lens.zero_()
            return

        def choose(level: int, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            ids, scores, laws = self._children(level, states, tree.fanout, tell=probs is not None)
            if probs is not None and laws is not None:
                tree.place_laws(probs, level, laws)
            return ids, scores

        out.ids[:] = fill(tree, choose, self._expand, feature, states, width=width, first=self._committed)
        out.parents[:] = tree.parents
        lens = tree.lens_within(self._room)
        if width < len(tree):
            lens.clamp_(max=width)
        out.lens[:] = torch.minimum(self._step.budget, lens)

    def _grown(self, fanout: int, feature: torch.Tensor, states: torch.Tensor) -> None:
        def choose(level: int, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self._children(level, states, fanout, tell=False)[:2]

        width = self._step.width
        if all_drafted(self._step.budget, 0):
            self._out.lens.zero_()
            return
        grow(
            choose,
            self._expand,
            feature,
            states,
            fanout=fanout,
            depth=min(self._plan.needs.depth, width),
            width=width,
            room=self._room,
            first=self._committed,
            budget=self._step.budget,
            out=self._out,
        )

    # -- one level ------------------------------------------------------------------------------
    def _places_of(self, nodes: int) -> torch.Tensor:
        """``[depth + 1, B * nodes]``: the places of the tokens of each level, for ``nodes`` nodes a row."""
        if nodes not in self._nodes_places:
            self._nodes_places[nodes] = self._places[:, self._rows[nodes]]
        return self._nodes_places[nodes]

    def _choose(
        self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``[T, count]`` ids and scores: with the target's noise, or the head's best tokens."""
        greedy, vocabulary = self._plan.greedy, self._head.draft_ids
        return draw(self._step, logits, rows, positions, count, greedy=greedy, vocabulary=vocabulary)

    def _children(
        self, level: int, states: torch.Tensor, count: int, *, tell: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Ids and scores ``[B, n, count]`` of the best children of ``[B, n, H]`` nodes, and their laws."""
        batch, nodes, hidden = states.shape
        rows = self._rows[nodes]
        at = self._places_of(nodes)[level]
        logits = self._head.logits(states.reshape(batch * nodes, hidden))
        ids, scores = self._choose(logits, rows, at, count)
        laws = None
        if tell:
            told = self._step.probs(logits, rows, at, ids, vocabulary=self._head.draft_ids)
            laws = told.view(batch, nodes, count, -1)
        return ids.view(batch, nodes, count), scores.view(batch, nodes, count), laws

    def _expand(
        self,
        level: int,
        ids: torch.Tensor,
        feature: torch.Tensor,
        parents: torch.Tensor,
        paths: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The forward of the nodes of a level, in scratch slots: :data:`~specdecode.heads.trees.Expand`."""
        batch, nodes = ids.shape
        rows = self._rows[nodes]
        places = self._places_of(nodes)
        scratch = paths.reshape(batch * nodes, level)
        made, states = self._head(
            ids.flatten(),
            feature.flatten(0, 1),
            places[level - 1],
            self._step.ctx(rows, scratch[:, -1], places[0], scratch),
            self._caches,
            rows=parents,
        )
        shape = (batch, nodes, -1)
        return made.view(shape), states.view(shape)
