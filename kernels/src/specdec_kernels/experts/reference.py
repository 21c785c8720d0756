"""Mixtures of experts in torch, with the kernels' roundings."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..linear import PackedMatrix
from ..linear.reference import dense_linear
from ..projection import Stream
from ..projection.reference import normalized_product, stream_of
from .groups import Groups, PackedExperts, group


def choose(logits: torch.Tensor, count: int, *, normalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    shares = logits.softmax(-1)
    ids = logits.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    weights = shares.gather(-1, ids)
    return ids, weights / weights.sum(-1, keepdim=True) if normalize else weights


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, groups: Groups) -> torch.Tensor:
    y = x.new_empty(x.shape[0], weight.shape[1])
    for expert, rows in groups.touched():
        y[rows] = F.linear(x[rows], weight[expert])
    return y


def packed_grouped_linear(x: torch.Tensor, weight: PackedExperts, groups: Groups) -> torch.Tensor:
    y = x.new_empty(x.shape[0], weight.out_features)
    for expert, rows in groups.touched():
        own = PackedMatrix(weight.values[expert], None, weight.out_features, weight.in_features)
        y[rows] = dense_linear(x[rows], own, None)
    return y


def combine(y: torch.Tensor, groups: Groups, weights: torch.Tensor) -> torch.Tensor:
    total = y.new_zeros((len(weights), y.shape[1]), dtype=torch.float32)
    for place, weight in zip(groups.places.T, weights.T, strict=True):
        total += y[place].float() * weight[:, None]
    return total.to(y.dtype)


def mix(
    x: torch.Tensor,
    logits: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    count: int,
    normalize: bool,
    activation: str,
) -> torch.Tensor:
    stream = Stream(x, x, None)
    return _sums(stream, logits, gate_up, down, 0.0, count, normalize, activation).to(x.dtype)


def add_experts(
    stream: Stream,
    router: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gain: torch.Tensor,
    *,
    eps: float,
    count: int,
    normalize: bool,
    activation: str,
) -> Stream:
    sums = expert_sums(
        stream, router, gate_up, down, eps=eps, count=count, normalize=normalize, activation=activation
    )
    return stream_of(stream.residual + sums, gain)


def expert_sums(
    stream: Stream,
    router: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    eps: float,
    count: int,
    normalize: bool,
    activation: str,
) -> torch.Tensor:
    logits = normalized_product(stream, router, None, eps)
    return _sums(stream, logits, gate_up, down, eps, count, normalize, activation).to(stream.residual.dtype)


def _sums(
    stream: Stream,
    logits: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    eps: float,
    count: int,
    normalize: bool,
    activation: str,
) -> torch.Tensor:
    """``[T, H]`` float32; the weight of an expert is rounded into what its gate lets through."""
    ids, weights = choose(logits, count, normalize=normalize)
    groups = group(ids, len(gate_up))
    x, shares = stream.scaled, weights.flatten()[groups.places.flatten().argsort()]
    y = x.new_empty((len(groups.tokens), down.shape[1]), dtype=torch.float32)
    for expert, rows in groups.touched():
        tokens = groups.tokens[rows]
        own = Stream(
            stream.residual[tokens],
            x[tokens],
            None if stream.squares is None else stream.squares[:, tokens],
        )
        gate, up = normalized_product(own, gate_up[expert], None, eps).chunk(2, 1)
        gate = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
        gated = (gate * up * shares[rows, None]).to(x.dtype)
        y[rows] = F.linear(gated.float(), down[expert].float())
    total = y.new_zeros(len(ids), down.shape[1])
    for place in groups.places.T:
        total += y[place]
    return total
