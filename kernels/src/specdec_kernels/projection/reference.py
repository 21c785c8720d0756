"""The fused products in torch, with the kernels' roundings."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from ..kv_write.reference import write_kv
from ..quantized import WordMatrix
from ..rotary.reference import rotate as rotate_heads
from .stream import COLUMNS, Stream
from .tiles import columns_of

Weight = torch.Tensor | WordMatrix


def embed(ids: torch.Tensor, table: torch.Tensor, gain: torch.Tensor) -> Stream:
    return stream_of(F.embedding(ids, table), gain)


def join(
    ids: torch.Tensor,
    table: torch.Tensor,
    features: torch.Tensor,
    *,
    table_gain: torch.Tensor | None,
    feature_gain: torch.Tensor | None,
    eps: float,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    features = features if rows is None else features[rows]
    parts = ((F.embedding(ids, table), table_gain), (features, feature_gain))
    return torch.cat([x if gain is None else _rms_norm(x, gain, eps) for x, gain in parts], 1)


def gather(parts: Sequence[torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    return torch.cat([part[rows] for part in parts], 1)


def _rms_norm(x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x.float(), (x.shape[1],), gain.float(), eps).to(x.dtype)


def project_qkv(
    stream: Stream,
    weight: Weight,
    bias: torch.Tensor | None,
    *,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    write_slots: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    query_gain: torch.Tensor | None,
    key_gain: torch.Tensor | None,
    rotate: bool,
    delta: torch.Tensor | None = None,
) -> torch.Tensor:
    kv_heads, dim = key_cache.shape[2:]
    heads = normalized_product(stream, weight, bias, eps, delta).unflatten(1, (-1, dim))
    query, key, value = heads.split((heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads), 1)
    if query_gain is not None and key_gain is not None:
        query = F.rms_norm(query, (dim,), query_gain.float(), eps)
        key = F.rms_norm(key, (dim,), key_gain.float(), eps)
    if rotate:
        table = cos[positions], sin[positions]
        query, key = rotate_heads(query.contiguous(), *table), rotate_heads(key.contiguous(), *table)
    dtype = stream.scaled.dtype
    write_kv(key, value, key_cache, value_cache, write_slots)
    return query.to(dtype)


def project_gate_up(
    stream: Stream,
    weight: Weight,
    bias: torch.Tensor | None,
    *,
    eps: float,
    activation: str,
    delta: torch.Tensor | None = None,
) -> torch.Tensor:
    gate, up = normalized_product(stream, weight, bias, eps, delta).chunk(2, 1)
    gate = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return (gate * up).to(stream.scaled.dtype)


def add_product(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None,
    stream: Stream,
    gain: torch.Tensor,
    *,
    delta: torch.Tensor | None = None,
) -> Stream:
    return stream_of(stream.residual + product(x, weight, bias, delta), gain, columns_of(weight))


def add(
    terms: torch.Tensor, stream: Stream | None, gain: torch.Tensor, weight: Weight | None = None
) -> Stream:
    total = terms[0].float()
    for term in terms[1:]:
        total = total + term.float()
    total = total.to(terms.dtype)
    columns = COLUMNS if weight is None else columns_of(weight)
    return stream_of(total if stream is None else stream.residual + total, gain, columns)


def normalize(
    stream: Stream, gain: torch.Tensor, eps: float, rows: torch.Tensor | None = None
) -> torch.Tensor:
    residual, scale = stream.residual, _scale(stream, eps)
    if rows is not None:
        residual, scale = residual[rows], scale[rows]
    return (residual.float() * scale * gain.float()).to(residual.dtype)


def product(
    x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, delta: torch.Tensor | None = None
) -> torch.Tensor:
    y = F.linear(x.float(), _float(weight), None if bias is None else bias.float())
    return (y if delta is None else y + delta.float()).to(x.dtype)


def _float(weight: Weight) -> torch.Tensor:
    return weight.float() if isinstance(weight, torch.Tensor) else weight.matrix().dequantized()


def normalized_product(
    stream: Stream,
    weight: Weight,
    bias: torch.Tensor | None,
    eps: float,
    delta: torch.Tensor | None = None,
) -> torch.Tensor:
    """The normalised stream times ``weight``, in float32."""
    y = F.linear(stream.scaled.float(), _float(weight))
    y = y if delta is None else y + delta.float()
    if stream.squares is not None:
        y = y * _scale(stream, eps)
    return y if bias is None else y + bias.float()


def _scale(stream: Stream, eps: float) -> torch.Tensor:
    assert stream.squares is not None  # a norm is still to be made
    tokens, width = stream.residual.shape
    return (stream.squares[:, :tokens].sum(0) / width + eps).rsqrt()[:, None]


def stream_of(residual: torch.Tensor, gain: torch.Tensor, columns: int = COLUMNS) -> Stream:
    """``residual`` as the stream that enters a norm of ``gain``."""
    tokens, width = residual.shape
    stream = Stream.empty(tokens, width, residual, columns)
    squares = F.pad(residual.float().square(), (0, -width % columns)).unflatten(1, (-1, columns)).sum(2)
    assert stream.squares is not None
    stream.squares[:, :tokens] = squares.T
    return Stream(residual, (residual.float() * gain.float()).to(residual.dtype), stream.squares, columns)
