"""An EAGLE-like head: taps, one decoder layer of its own, the target's embedding and LM head; chain or tree.

Untrained: its weights pass the token's embedding through, so it is right as often as the target's next
token follows from the last token alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch

from ...contract import (
    EMBED,
    LM_HEAD,
    Drafts,
    Needs,
    Proposer,
    Resources,
    StepView,
    TargetHandle,
    TargetInfo,
)
from ...heads.layers import layer_config
from ...layers import RMSNorm, RotaryEmbedding
from ...layers.linear import Linear
from ...models import DecoderConfig, DecoderLayer
from .config import EagleConfig
from .trees import FixedTree, fill, grow


class EagleHead:
    """The weights, and one forward: ``(feature of j-1, token j) -> (feature of j, logits of j+1)``."""

    def __init__(self, target: TargetHandle, num_taps: int, seed: int) -> None:
        hidden = target.info.hidden_size
        generator = torch.Generator().manual_seed(seed)
        self._embed = target.modules[EMBED]
        self._lm_head = target.modules[LM_HEAD]
        # Everything is small against the embedding, which is what the guess is to rest on.
        scale = float(self._embed(torch.arange(16, device=target.device)).float().std())

        def weight(rows: int, scale: float) -> torch.Tensor:
            values = torch.randn(rows, hidden, generator=generator) * scale / rows**0.5
            return values.to(device=target.device, dtype=target.dtype)

        self._fuse = weight(num_taps * hidden, 1.0) if num_taps > 1 else None
        self._mix = weight(hidden, 0.1 * scale)
        self._norm = RMSNorm(hidden, 1e-6, dtype=target.dtype, device=target.device)
        config = _layer_config(target.info)
        self._rotary = RotaryEmbedding(config.rope, target.info.max_model_len, device=target.device)
        self._layer = DecoderLayer(config, dtype=target.dtype, device=target.device)
        _randomize(self._layer, 0.3 * scale, generator)

    def feature(self, taps: Sequence[torch.Tensor]) -> torch.Tensor:
        """``[F, H]`` of the target's hidden states."""
        return taps[0] if self._fuse is None else torch.cat(tuple(taps), dim=-1) @ self._fuse

    def forward(
        self, ids: torch.Tensor, feature: torch.Tensor, positions: torch.Tensor, meta: Any, cache: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``[T, H]`` features, and ``[T, H]`` states for :meth:`logits`."""
        entry = self._embed(ids) + self._norm(feature) @ self._mix
        out, residual = self._layer(entry, None, self._rotary(positions), meta, cache)
        states, feature = self._norm.add(out, residual)
        return feature, states

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """``[R, vocab]``."""
        return self._lm_head(states)


def _layer_config(target: TargetInfo) -> DecoderConfig:
    return layer_config(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=2 * target.hidden_size,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        rms_norm_eps=1e-6,
        rope={"rope_type": "default", "rope_theta": 10000.0},
        max_positions=target.max_model_len,
    )


def _randomize(layer: DecoderLayer, written: float, generator: torch.Generator) -> None:
    """Random weights; what is written to the residual stream is of size ``written``. Norms stay 1."""
    for name, module in layer.named_modules():
        if isinstance(module, Linear):
            scale = written if name.endswith(("o_proj", "down_proj")) else 1.0
            shape = (module.out_features, module.in_features)
            module.load("weight", torch.randn(shape, generator=generator) * scale / module.in_features**0.5)


class EagleProposer(Proposer):
    """Entry ``j``: of token ``j`` and the hidden state of ``j - 1``; slot ``j``, rope position ``j - 1``."""

    def __init__(self, config: EagleConfig, needs: Needs) -> None:
        self._config = config
        self._needs = needs
        self._tree: FixedTree | None = None

    def load(self, target: TargetHandle) -> None:
        if self._config.topology is not None:
            self._tree = FixedTree(self._config.topology, target.device)
        self._head = EagleHead(target, len(self._needs.taps), self._config.seed)

    def bind(self, resources: Resources) -> None:
        (self._cache,) = resources.kv[0]

    def propose(self, step: StepView, out: Drafts) -> None:
        positions = step.positions
        features, states = self._head.forward(
            step.ids,
            self._head.feature(step.taps),
            (positions - 1).clamp(min=0),
            step.ctx(step.rows, positions, positions + 1),
            self._cache,
        )
        if not step.width:
            return
        features, states = features[step.last], states[step.last]
        if self._tree is not None:
            self._draft_static(step, out, self._tree, features, states)
        elif self._config.fanout is not None:
            self._draft_grown(step, out, self._config.fanout, features, states)
        else:
            self._draft_chain(step, out, features, states)

    # -- three shapes ---------------------------------------------------------------------------
    def _draft_chain(self, step: StepView, out: Drafts, feature: torch.Tensor, states: torch.Tensor) -> None:
        committed = step.committed_len
        rows = torch.arange(len(committed), device=committed.device)
        for level in range(step.width):
            ids = step.sample(self._head.logits(states), rows, committed + level)[0][:, 0]
            out.ids[:, level] = ids
            if level + 1 < step.width:
                slots = committed + level
                feature, states = self._head.forward(
                    ids, feature, slots - 1, step.ctx(rows, slots, slots + 1), self._cache
                )
        out.lens[:] = torch.minimum(step.budget, step.room)

    def _draft_static(
        self, step: StepView, out: Drafts, tree: FixedTree, feature: torch.Tensor, states: torch.Tensor
    ) -> None:
        ids, _ = self._root(step, states, tree.fanout)
        out.ids[:] = fill(tree, _Expansion(self, step, tree.fanout), ids, feature)
        out.parents[:] = tree.parents
        out.lens[:] = torch.minimum(step.budget, tree.lens_within(step.room))

    def _draft_grown(
        self, step: StepView, out: Drafts, fanout: int, feature: torch.Tensor, states: torch.Tensor
    ) -> None:
        ids, scores = self._root(step, states, fanout)
        grown = grow(
            _Expansion(self, step, fanout),
            ids,
            scores,
            feature,
            depth=min(self._needs.depth, step.width),
            width=self._needs.width,
            room=step.room,
        )
        count = grown.ids.shape[1]
        out.ids[:, :count] = grown.ids
        out.parents[:, :count] = grown.parents
        out.lens[:] = torch.minimum(step.budget, grown.lens)

    def _root(self, step: StepView, states: torch.Tensor, fanout: int) -> tuple[torch.Tensor, torch.Tensor]:
        committed = step.committed_len
        rows = torch.arange(len(committed), device=committed.device)
        return step.sample(self._head.logits(states), rows, committed, fanout)

    def expand(
        self,
        step: StepView,
        fanout: int,
        level: int,
        ids: torch.Tensor,
        feature: torch.Tensor,
        paths: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Forward the nodes of a level, in scratch slots; see :data:`trees.Expand`."""
        batch, nodes = ids.shape
        committed = step.committed_len.repeat_interleave(nodes)
        rows = torch.arange(batch, device=ids.device).repeat_interleave(nodes)
        scratch = committed[:, None] + paths.reshape(batch * nodes, level)
        features, states = self._head.forward(
            ids.flatten(),
            feature.reshape(batch * nodes, -1),
            (committed + level - 2).clamp(min=0),
            step.ctx(rows, scratch[:, -1], committed, scratch),
            self._cache,
        )
        children, scores = step.sample(self._head.logits(states), rows, committed + level, fanout)
        shape = (batch, nodes, -1)
        return features.view(shape), children.view(shape), scores.view(shape)


@attrs.frozen
class _Expansion:
    """:meth:`EagleProposer.expand` of one step."""

    proposer: EagleProposer
    step: StepView
    fanout: int

    def __call__(
        self, level: int, ids: torch.Tensor, hidden: torch.Tensor, paths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.proposer.expand(self.step, self.fanout, level, ids, hidden, paths)
