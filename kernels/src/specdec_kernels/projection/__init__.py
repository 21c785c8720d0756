"""Products of a decoder layer with their neighbours fused in: norms, rotary, KV writes, gates, residuals.

A layer is four launches and attention. Each product is one kernel for any number of tokens; a
token's result is the same, to the bit, whatever tokens stand beside it and however many. Products
are accumulated in float32. Rows of few tokens are bound by the bytes of the weights, which are read
once; many tokens by the tensor cores.

A norm's gain is rounded into the activations (``Stream.scaled``) and its scale applied to the
accumulator, where a norm of its own would round twice: logits differ from such a model's in the last
bits of the dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch

from ..gpu import takes
from ..quantized import WordMatrix
from ..ranks import Mail
from . import reference
from .stream import Stream

Activation = Literal["silu", "gelu_tanh"]
#: A matrix of the activations' dtype, or one that stays quantised.
Weight: TypeAlias = torch.Tensor | WordMatrix


def embed(ids: torch.Tensor, table: torch.Tensor, gain: torch.Tensor) -> Stream:
    """Rows of an embedding table as the stream that enters the first layer.

    Args:
        ids: ``[T]`` int64, each below ``V``.
        table: ``[V, H]``, contiguous.
        gain: ``[H]``, of the norm that comes next.
    """
    return _implementation(table, gain).embed(ids, table, gain)


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
    """Embeddings and other hidden states of tokens side by side, each normalised by its RMS: ``[T, E + H]``.

    What a draft layer on the target's hidden states takes in (EAGLE, arXiv 2401.15077; EAGLE-3, 2503.01840).
    Norms are rounded once.

    Args:
        ids: ``[T]`` int64, each below ``V``.
        table: ``[V, E]``, contiguous.
        features: ``[T, H]``; with ``rows`` of any number of tokens.
        table_gain, feature_gain: ``[E]`` and ``[H]``; None: as they are, without a norm.
        eps: of the norms.
        rows: ``[T]`` int64, which of ``features`` is each token's; None: its own.
    """
    gains = [gain for gain in (table_gain, feature_gain) if gain is not None]
    return _implementation(table, features, *gains).join(
        ids, table, features, table_gain=table_gain, feature_gain=feature_gain, eps=eps, rows=rows
    )


def gather(parts: Sequence[torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """Rows of several tensors of one width, side by side: ``[T, n H]``.

    Args:
        parts: ``n`` of ``[S, H]``.
        rows: ``[T]`` int64, each below ``S``.
    """
    return _implementation(*parts).gather(parts, rows)


def side_by_side(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """``[T, H]`` each, as one ``[T, n H]``; no copy where they are its columns already (:func:`gather`)."""
    first, count = parts[0], len(parts)
    tokens, width = first.shape
    storage, stride = first.untyped_storage().data_ptr(), (count * width, 1)
    if all(
        part.untyped_storage().data_ptr() == storage
        and part.storage_offset() == first.storage_offset() + place * width
        and part.stride() == stride
        and part.shape == first.shape
        for place, part in enumerate(parts)
    ):
        return first.as_strided((tokens, count * width), stride)
    return torch.cat(tuple(parts), dim=1)


def project_qkv(
    stream: Stream,
    weight: Weight,
    bias: torch.Tensor | None = None,
    *,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    write_slots: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    query_gain: torch.Tensor | None = None,
    key_gain: torch.Tensor | None = None,
    rotate: bool = True,
    delta: torch.Tensor | None = None,
) -> torch.Tensor:
    """Queries, keys and values of the normalised stream; keys and values go to the paged cache.

    In float32 up to the one rounding of what is stored: product, bias, the norm of each query and
    key head where gains are given (Qwen3), rotary of the pairs ``(i, i + R/2)`` of the first ``R``
    dimensions.

    Args:
        weight: ``[(Hq + 2 Hkv) D, H]``, rows of queries, keys, values; contiguous, ``D`` even.
        bias: ``[(Hq + 2 Hkv) D]``.
        eps: of the norm in front and of the heads' norms.
        cos, sin: ``[P, R/2]`` float32 tables by position, contiguous, ``R <= D``.
        positions: ``[T]`` int64, each below ``P``. They and the slots may be read before the kernel right
            before has ended, which must not write them.
        write_slots: ``[T]`` int64, ``block * block_size + offset``.
        key_cache, value_cache: ``[num_blocks, block_size, Hkv, D]`` of the stream's dtype or
            float8_e4m3fn, contiguous.
        query_gain, key_gain: ``[D]``, both or neither.
        rotate: False for layers without positions.
        delta: ``[T, (Hq + 2 Hkv) D]``, added to the products of ``stream.scaled`` before they are divided by
            its RMS and the bias is added: what an adapter makes of it (:mod:`specdec_kernels.lora`).

    Returns:
        The rotated queries, ``[T, Hq, D]``.
    """
    return _implementation(stream.scaled, weight, key_cache, value_cache).project_qkv(
        stream,
        weight,
        bias,
        eps=eps,
        cos=cos,
        sin=sin,
        positions=positions,
        write_slots=write_slots,
        key_cache=key_cache,
        value_cache=value_cache,
        query_gain=query_gain,
        key_gain=key_gain,
        rotate=rotate,
        delta=delta,
    )


def project_gate_up(
    stream: Stream,
    weight: Weight,
    bias: torch.Tensor | None = None,
    *,
    eps: float,
    activation: Activation,
    delta: torch.Tensor | None = None,
) -> torch.Tensor:
    """``act(gate) * up`` of the normalised stream, ``[T, I]`` (GLU variants: Shazeer, arXiv 2002.05202).

    Args:
        weight: ``[2 I, H]``, rows of the gate, then of the other half; contiguous.
        bias: ``[2 I]``.
        eps: of the norm in front.
        activation: ``silu``, or ``gelu_tanh``, GELU by its tanh approximation.
        delta: ``[T, 2 I]``, as of :func:`project_qkv`.
    """
    return _implementation(stream.scaled, weight).project_gate_up(
        stream, weight, bias, eps=eps, activation=activation, delta=delta
    )


def add_product(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None,
    stream: Stream,
    gain: torch.Tensor,
    *,
    delta: torch.Tensor | None = None,
    mail: Mail | None = None,
) -> Stream:
    """The stream with ``x W^T + b`` added, scaled by the gain of the norm that comes next.

    The product is rounded to the dtype before it is added. ``stream`` stays as it is.

    Args:
        x: ``[T, K]``.
        weight: ``[H, K]``, contiguous.
        bias: ``[H]``.
        gain: ``[H]``.
        delta: ``[T, H]``, part of the product.
        mail: on a GPU, of ranks that each have some of the inputs: the rounded products of all are summed, as
            :func:`add` sums them. It :meth:`~specdec_kernels.ranks.Mail.takes` ``[T, H]``. Of the ranks'
            biases and deltas all are added.
    """
    how = {} if mail is None else {"mail": mail}
    return _implementation(x, weight, gain).add_product(x, weight, bias, stream, gain, delta=delta, **how)


def add(
    terms: torch.Tensor, stream: Stream | None, gain: torch.Tensor, weight: Weight | None = None
) -> Stream:
    """The stream with a sum added, scaled by the gain of the norm that comes next.

    What :func:`add_product` ends with, for products whose terms come from several devices. The terms are
    summed in float32, in their order, and rounded to the dtype before they are added.

    Args:
        terms: ``[n, T, H]``.
        stream: None: the sum begins one.
        gain: ``[H]``.
        weight: of the product whose terms they are: then the stream is :func:`add_product`'s, to the bit.
    """
    return _implementation(terms, gain).add(terms, stream, gain, weight)


def normalize(
    stream: Stream, gain: torch.Tensor, eps: float, rows: torch.Tensor | None = None
) -> torch.Tensor:
    """``residual / rms * gain``, ``[T, H]``, rounded once: the final norm.

    ``rows``: ``[R]`` int64, of the tokens wanted; None: all.
    """
    return _implementation(stream.residual, gain).normalize(stream, gain, eps, rows)


def product(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None = None,
    *,
    delta: torch.Tensor | None = None,
) -> torch.Tensor:
    """``x W^T + b``: ``[T, K]`` and ``[N, K]``, this one contiguous, to ``[T, N]`` of the dtype of ``x``.

    Args:
        delta: ``[T, N]``, added before it is rounded.
    """
    return _implementation(x, weight).product(x, weight, bias, delta)


def _implementation(*tensors: Weight):
    if takes(*(tensor for tensor in tensors if isinstance(tensor, torch.Tensor))):
        from . import gpu  # needs Triton

        return gpu
    return reference


__all__ = [
    "Activation",
    "Stream",
    "Weight",
    "add",
    "add_product",
    "embed",
    "gather",
    "join",
    "normalize",
    "product",
    "project_gate_up",
    "project_qkv",
    "side_by_side",
]
