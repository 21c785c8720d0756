"""The native decoder on a GPU: a layer is four products with fused epilogues and one attention.

No launch is spent on a norm, an activation, a rotation, a cache write or an addition: each is the epilogue of
the product before it (:mod:`specdec_kernels.projection`). It rounds differently from the layers of
:mod:`.decoder`: a product takes its rows scaled by the norm's gain alone and is divided by their RMS in
float32 behind it, where a norm is rounded first. The rows of every kernel are invariant, so the bits of a
token do not depend on what is computed beside it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, cast

import torch
from specdec_kernels.attention import AttentionMetadata
from specdec_kernels.gpu import takes
from specdec_kernels.projection import (
    Activation,
    Stream,
    add,
    add_product,
    embed,
    normalize,
    product,
    project_gate_up,
    project_qkv,
)

from specdecode.layers import (
    GivenEmbeddings,
    KVCache,
    RotaryEmbedding,
    RotatingBackend,
    RowParallelLinear,
    TorchBackend,
)

from .config import ACTIVATIONS, DecoderConfig
from .experts import SparseMLP

if TYPE_CHECKING:
    from .decoder import Decoder, DecoderLayer

#: The activation layer's name of an activation -> the product's.
_GATES: dict[str, Activation] = {"silu_and_mul": "silu", "gelu_tanh_and_mul": "gelu_tanh"}
#: "1" and "0" in the environment force the fused forward on (on the torch references, where no kernel takes
#: the device) and off.
SWITCH = "SPECDECODE_FUSED"


def can_fuse(dtype: torch.dtype, device: torch.device, backend: RotatingBackend | None = None) -> bool:
    """Whether a decoder of ``dtype`` on ``device`` computes by :func:`fused_forward`.

    The products store keys and values as :class:`~specdecode.layers.TorchBackend` does; a backend that
    stores them in its own way is given them by the layers instead.
    """
    if backend is not None and not isinstance(backend, TorchBackend):
        return False
    switch = os.environ.get(SWITCH)
    if switch in ("0", "1"):
        return switch == "1"
    return device.type == "cuda" and takes(torch.empty(0, dtype=dtype, device=device))


def fused_forward(
    decoder: Decoder,
    ids: torch.Tensor,
    positions: torch.Tensor,
    meta: AttentionMetadata,
    caches: Sequence[KVCache],
    taps: Collection[int] = (),
    given: GivenEmbeddings | None = None,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """:meth:`Decoder.forward` by fused kernels: the same arguments and, but for rounding, results.

    Looks at no value on the host, so it can be captured into a CUDA graph whose inputs keep their addresses.
    """
    if not ids.numel():
        nothing = decoder.norm.weight.new_empty(0, decoder.config.hidden_size)
        return nothing, (nothing,) * len(taps)
    layers = cast("list[DecoderLayer]", list(decoder.layers))
    gains = [layer.input_layernorm.weight for layer in layers]  # each scales the stream for its layer
    gains.append(decoder.norm.weight)
    tapped: dict[int, torch.Tensor] = {}
    if given is not None:
        stream = add(given.put_into(decoder.embed_tokens(ids))[None], None, gains[0])
    elif decoder.embed_tokens.whole:
        stream = embed(ids, decoder.embed_tokens.weight, gains[0])
    else:
        stream = add(decoder.embed_tokens(ids)[None], None, gains[0])
    for index, (layer, cache) in enumerate(zip(layers, caches, strict=True)):
        if index in taps:
            tapped[index] = stream.residual
        stream = fused_layer(
            layer, stream, decoder.rotary, positions, meta, cache, gains[index + 1], config=decoder.config
        )
    tapped[len(layers)] = stream.residual
    hidden = normalize(stream, decoder.norm.weight, decoder.config.rms_norm_eps)
    return hidden, tuple(tapped[boundary] for boundary in taps)


def fused_layer(
    layer: DecoderLayer,
    stream: Stream,
    rotary: RotaryEmbedding,
    positions: torch.Tensor,
    meta: AttentionMetadata,
    cache: KVCache,
    next_gain: torch.Tensor,
    *,
    config: DecoderConfig,
) -> Stream:
    """The stream that enters a layer to the one that leaves it, scaled for the norm that comes next.

    Args:
        stream: scaled by the layer's first norm; what :class:`Stream` says of ``squares=None`` holds.
        positions: ``[T]`` int64, rows of the tables of ``rotary``.
        next_gain: ``[H]``, of that norm.
    """
    attention, mlp = layer.self_attn, layer.mlp
    query = fused_write(layer, stream, rotary, positions, meta, cache, config=config)
    attended = attention.attention.attend(query, meta, cache)
    stream = _add_product(
        attended.flatten(1), attention.o_proj, stream, layer.post_attention_layernorm.weight
    )
    if isinstance(mlp, SparseMLP):
        return mlp.add_to(stream, next_gain, config.rms_norm_eps)
    gated = project_gate_up(
        stream,
        mlp.gate_up_proj.operand,
        mlp.gate_up_proj.bias,
        eps=config.rms_norm_eps,
        activation=_GATES[ACTIVATIONS[config.hidden_act]],
        delta=mlp.gate_up_proj.delta(stream.scaled),
    )
    return _add_product(gated, mlp.down_proj, stream, next_gain)


def fused_write(
    layer: DecoderLayer,
    stream: Stream,
    rotary: RotaryEmbedding,
    positions: torch.Tensor,
    meta: AttentionMetadata,
    cache: KVCache,
    *,
    config: DecoderConfig,
) -> torch.Tensor:
    """Write a layer's keys and values, and no more: its queries. For arguments see :func:`fused_layer`."""
    attention = layer.self_attn
    return project_qkv(
        stream,
        attention.qkv_proj.operand,
        attention.qkv_proj.bias,
        eps=config.rms_norm_eps,
        cos=rotary.cos,
        sin=rotary.sin,
        positions=positions,
        write_slots=meta.write_slots,
        key_cache=cache[0],
        value_cache=cache[1],
        query_gain=None if attention.q_norm is None else attention.q_norm.weight,
        key_gain=None if attention.k_norm is None else attention.k_norm.weight,
        rotate=attention.rotary,
        delta=attention.qkv_proj.delta(stream.scaled),
    )


def _add_product(x: torch.Tensor, linear: RowParallelLinear, stream: Stream, gain: torch.Tensor) -> Stream:
    """The stream with a row-parallel product added, summed over the ranks: by the product where it can."""
    group, weight, delta = linear.group, linear.operand, linear.delta(x)
    mail = group.mail(stream.residual)
    if group.size == 1 or mail is not None:
        return add_product(x, weight, linear.bias, stream, gain, delta=delta, mail=mail)
    return add(group.terms(product(x, weight, linear.bias, delta=delta)), stream, gain, weight)
