"""The speculator: a hidden state and the token behind it to the state and the logits of the next.

Shapes: ``T`` rows, ``H`` the target's hidden size, ``D`` inner size, ``V`` the vocabulary.
"""

from __future__ import annotations

import math

import torch
from specdec_kernels.projection import product
from specdecode.layers import ColumnParallelLinear, VocabEmbedding
from specdecode.models import can_fuse

from .layouts import source
from .spec import SpeculatorSpec

_EPS = 1e-6


class MlpSpeculator(torch.nn.Module):
    """A multi-stage MLP with a state (Wertheimer et al., arXiv 2404.19124); filled in by ``loading``.

    Step ``k`` mixes the state before it with the embedding of the token drawn from that. Two scalings keep
    their proportion what it was in training, whatever the sizes: of the embedding against the state, by
    ``n_predict`` and ``D``, and (``scale_input``) of the target's state, normed and halved in power.

    Args:
        depth: steps that are used.
    """

    def __init__(self, spec: SpeculatorSpec, depth: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec, self._fused = spec, can_fuse(dtype, device)
        size, rows = spec.inner_size, spec.rows

        def sources(kind: str) -> list[str]:
            """By step, the key of the module that it uses."""
            return [source(f"{kind}.{step}.weight", tied=spec.tied).split(".")[1] for step in range(depth)]

        self._emb, self._proj, self._head, self._ln = (sources(k) for k in ("emb", "proj", "head", "ln"))
        self.emb = torch.nn.ModuleDict(
            {key: VocabEmbedding(spec.vocab_size, size, dtype=dtype, device=device) for key in set(self._emb)}
        )
        self.proj = torch.nn.ModuleDict(
            {
                key: ColumnParallelLinear(
                    size if int(key) else spec.hidden_size, size, dtype=dtype, device=device
                )
                for key in set(self._proj)
            }
        )
        self.head = torch.nn.ModuleDict(
            {key: ColumnParallelLinear(size, rows, dtype=dtype, device=device) for key in set(self._head)}
        )
        self.ln = torch.nn.ModuleDict(
            {key: ScaledNorm(size, dtype=dtype, device=device) for key in set(self._ln)}
        )
        self._scale = embedding_scale(spec.n_predict, size)

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[T, H]`` after the target's final norm -> the state ``[T, H]`` before step 0."""
        return normalize(hidden) / math.sqrt(2) if self.spec.scale_input else hidden

    def forward(self, step: int, state: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The state ``[T, D]`` of step ``step``.

        Args:
            state: ``[T, H]`` of :meth:`enter` for step 0, else ``[T, D]`` of the step before.
            ids: ``[T]`` int64, the token behind it.
        """
        mixed = self._project(self.proj[self._proj[step]], state) + self._scale * self.emb[self._emb[step]](
            ids
        )
        made: torch.Tensor = torch.nn.functional.gelu(self.ln[self._ln[step]](mixed))
        return made

    def logits(self, step: int, state: torch.Tensor) -> torch.Tensor:
        """``[T, D]`` of step ``step`` -> ``[T, rows]``, of the first tokens of the vocabulary."""
        return self._project(self.head[self._head[step]], state)

    def _project(self, linear: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = product(x, linear.weight, None) if self._fused else linear(x)  # type: ignore[arg-type]
        return made


class ScaledNorm(torch.nn.Module):
    """RMS normalisation with a gain and a shift; no mean is taken off, though it is called ``ln``."""

    def __init__(self, size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        for name in ("weight", "bias"):
            empty = torch.empty(size, dtype=dtype, device=device)
            setattr(self, name, torch.nn.Parameter(empty, requires_grad=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, D] -> [T, D]``."""
        return torch.addcmul(self.bias, self.weight, normalize(x))  # type: ignore[arg-type]


def normalize(x: torch.Tensor) -> torch.Tensor:
    """``x`` by the root of the mean of its squares, over the last dimension, in float32."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + _EPS)).to(x.dtype)


def embedding_scale(n_predict: int, inner_size: int) -> float:
    """The weight of an embedding by that of the state: after ``n_predict`` steps half its power is left."""
    state = 0.5 ** (0.5 / n_predict)
    return math.sqrt((1 - state**2) * inner_size / 2) / state
