"""The drafter at work: one pass a step feeds what is new and drafts all tokens."""

from __future__ import annotations

import attrs
import torch
from specdecode.contract import Drafts, Proposer, Resources, StepView, TargetHandle
from specdecode.heads.drawing import draw
from specdecode.heads.stopping import all_drafted

from .model import load_drafter
from .planning import Plan


@attrs.frozen(eq=False)
class _Pass:
    """Where the tokens of one pass stand: of each row those fed, then its ``M`` mask tokens.

    Attributes:
        fed: ``[F]`` int64, place of each fed token.
        masks: ``[B, M]`` int64, places of the mask tokens.
        rows: ``[N]`` int64, the row of each token of the pass, ascending.
    """

    fed: torch.Tensor
    masks: torch.Tensor
    rows: torch.Tensor

    @classmethod
    def of(cls, rows: torch.Tensor, batch: int, masks: int) -> _Pass:
        """``rows``: ``[F]`` int64, of the tokens fed."""
        device = rows.device
        every = torch.arange(batch, device=device)
        fed = torch.arange(rows.shape[0], device=device) + rows * masks
        ends = torch.searchsorted(rows, every, right=True) + every * masks
        behind = ends[:, None] + torch.arange(masks, device=device)
        both = torch.empty(rows.shape[0] + batch * masks, dtype=torch.int64, device=device)
        both[fed] = rows
        both[behind] = every[:, None]
        return cls(fed, behind, both)

    def join(self, fed: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
        """``[N, ...]`` of ``[F, ...]`` and what broadcasts to ``[B, M, ...]``."""
        joined = fed.new_empty(self.rows.shape[0], *fed.shape[1:])
        joined[self.fed] = fed
        joined[self.masks] = masks.to(joined.dtype)
        return joined


class ParallelProposer(Proposer):
    """Draft 1 is read off the last fed token, draft ``s + 1`` off mask token ``s``, all in the same pass.

    Entry ``j`` of the draft layers is of token ``j`` and the target's states at ``j - 1``, in slot ``j``,
    rotated as position ``j``. Mask token ``s`` stands where draft ``s`` will: it writes to that scratch slot,
    and sees the true entries and the masks up to itself (P-EAGLE's order). The next feed overwrites them.
    Nothing is kept of a request; all is on the device and static in shape.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def load(self, target: TargetHandle) -> None:
        self._model = load_drafter(self._plan.drafter, target)

    def bind(self, resources: Resources) -> None:
        self._caches = resources.kv[0]

    # --8<-- [start:propose]
    def propose(self, step: StepView, out: Drafts) -> None:
        committed, model = step.committed_len, self._model
        left = (self._plan.longest - committed).clamp(min=0)
        torch.minimum(step.budget, torch.minimum(step.room, left), out=out.lens)
        width = 0 if all_drafted(out.lens, 0) else step.width
        states = self._pass(step, max(0, width - 1))
        if not width:
            return
        batch, device = committed.shape[0], committed.device
        rows = torch.arange(batch, device=device).repeat_interleave(width)
        at = (committed[:, None] + torch.arange(width, device=device)).flatten()
        logits = model.logits(states.flatten(0, 1))
        ids, _ = draw(step, logits, rows, at, 1, greedy=self._plan.greedy)
        out.ids[:, :width] = ids.view(batch, width)
        if out.probs is not None:
            out.probs[:, :width] = step.probs(logits, rows, at, ids).view(batch, width, -1)

    def _pass(self, step: StepView, masks: int) -> torch.Tensor:
        """``[B, 1 + masks, h]``: the states at each row's last token and at its mask tokens."""
        model, committed, positions = self._model, step.committed_len, step.positions
        batch, device = committed.shape[0], committed.device
        places = _Pass.of(step.rows, batch, masks)
        scratch = committed[:, None] + torch.arange(masks, device=device)  # [B, M]
        slots = places.join(positions, scratch)
        base = places.join(positions + 1, committed[:, None])
        own = None
        if masks:
            unused = torch.full((positions.shape[0], masks), -1, dtype=torch.int64, device=device)
            order = torch.ones(masks, masks, dtype=torch.bool, device=device).tril()
            own = places.join(unused, torch.where(order, scratch[:, None], -1))
        x = places.join(model.feed(step.ids, step.taps), model.mask)
        states: torch.Tensor = model(x, slots, step.ctx(places.rows, slots, base, own), self._caches)
        return states[torch.cat((places.fed[step.last][:, None], places.masks), 1)]

    # --8<-- [end:propose]
