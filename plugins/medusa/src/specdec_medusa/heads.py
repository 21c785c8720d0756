"""The heads: the target's last hidden state to the logits of the tokens behind the next one.

Shapes: ``B`` rows, ``H`` hidden size, ``Vd`` tokens that can be drafted.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from specdec_kernels.projection import product
from specdecode.layers import ColumnParallelLinear, MergedColumnParallelLinear
from specdecode.models import can_fuse

from .spec import HeadsSpec

LmHead = Callable[[torch.Tensor], torch.Tensor]


class MedusaHeads(torch.nn.Module):
    """Residual layers and an output layer for each head (arXiv 2401.10774); filled in by ``loading``.

    Attributes:
        draft_ids: ``[Vd]`` int64, the target's id of each row of the output layers; None: row ``j`` is
            token ``j``.

    Args:
        depth: how many of the heads are used; the others are left out.
        target_lm_head: the target's, where the heads have none of their own.
    """

    draft_ids: torch.Tensor | None

    def __init__(
        self,
        spec: HeadsSpec,
        depth: int,
        *,
        target_lm_head: LmHead | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.spec, self.depth, self.target_lm_head = spec, depth, target_lm_head
        self._fused = can_fuse(dtype, device)
        hidden = spec.hidden_size
        #: Every head's first layer reads the same state: one product.
        self.first = MergedColumnParallelLinear(
            hidden,
            {str(head): hidden for head in range(depth)},
            bias=spec.bias,
            dtype=dtype,
            device=device,
        )
        #: Those behind it, layer by layer: head ``i`` of layer ``j`` is number ``(j - 1) * depth + i``.
        self.deeper = torch.nn.ModuleList(
            ColumnParallelLinear(hidden, hidden, bias=spec.bias, dtype=dtype, device=device)
            for _ in range((spec.num_layers - 1) * depth)
        )
        outputs = {"own": depth, "shared": 1, "target": 0}[spec.output]
        self.out = torch.nn.ModuleList(
            ColumnParallelLinear(hidden, spec.rows or 0, dtype=dtype, device=device) for _ in range(outputs)
        )
        ids = None if spec.draft_ids is None else torch.from_numpy(spec.draft_ids).to(device)
        self.register_buffer("draft_ids", ids, persistent=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[B, H]`` after the target's final norm -> ``[B, depth, H]``, what each output layer reads."""
        silu = torch.nn.functional.silu
        states = hidden[:, None] + silu(
            self._project(self.first, hidden).view(hidden.shape[0], self.depth, -1)
        )
        for first in range(0, len(self.deeper), self.depth):
            made = [
                self._project(self.deeper[first + head], states[:, head].contiguous())
                for head in range(self.depth)
            ]
            states = states + silu(torch.stack(made, dim=1))
        return states

    @property
    def one_output(self) -> bool:
        """Whether all heads have one output layer, so that its weights need be read once for all of them."""
        return self.spec.output != "own"

    def logits(self, states: torch.Tensor, first: int) -> torch.Tensor:
        """``[B, m, H]`` of heads ``first..first+m-1`` -> ``[B * m, Vd]``, of the tokens ``draft_ids``.

        Args:
            states: of one head alone, unless :attr:`one_output`.
        """
        rows = states.reshape(-1, states.shape[-1]).contiguous()
        if self.spec.output == "target":
            assert self.target_lm_head is not None
            logits = self.target_lm_head(rows)
            logits = logits if self.draft_ids is None else logits[:, self.draft_ids]
        else:
            logits = self._project(self.out[0 if self.one_output else first], rows)
        return logits if self.spec.logit_scale == 1.0 else logits * self.spec.logit_scale

    def _project(self, linear: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = product(x, linear.weight, linear.bias) if self._fused else linear(x)  # type: ignore[arg-type]
        return made
