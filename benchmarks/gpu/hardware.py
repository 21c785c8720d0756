"""What the card itself does: the rate of a copy and of a read, and the peak of a matrix product."""

from __future__ import annotations

from typing import Any

import torch
from specdecode.models import weight_bytes
from timing import device_ms


def measure(device: torch.device, dtype: torch.dtype) -> list[dict[str, Any]]:
    """Medians, on random data."""
    copy, read = _bandwidth(device)
    size = 8192 if device.type == "cuda" else 256
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    product = device_ms(lambda: left @ right)
    return [
        {"what": "copy", "value": copy, "unit": "TB/s, read and write counted"},
        {"what": "read", "value": read, "unit": "TB/s, a maximum over int32"},
        {"what": "matmul", "value": 2 * size**3 / product / 1e9, "unit": f"TFLOP/s, {size}^3 {dtype}"},
    ]


def measure_copy(device: torch.device) -> float:
    """TB/s of a copy alone, read and write counted."""
    return _bandwidth(device)[0]


def _bandwidth(device: torch.device) -> tuple[float, float]:
    """TB/s of a copy and of a read, of 2 GiB on a GPU: no cache holds them."""
    count = 1 << (30 if device.type == "cuda" else 22)
    source = torch.empty(count, dtype=torch.bfloat16, device=device).normal_()
    words = source.view(torch.int32)
    copied = torch.empty_like(source)
    copy = device_ms(lambda: copied.copy_(source))
    read = device_ms(lambda: words.max())
    return 2 * source.nbytes / copy / 1e9, source.nbytes / read / 1e9


def floor_ms(decoder: Any, batch: int, context: int, bytes_per_s: float) -> float:
    """A decode step's bytes, weights and KV, at a rate: no step is faster.

    The embedding table is looked up, not read, unless the output layer shares it.
    """
    config = decoder.config
    weights = weight_bytes(decoder)
    if not config.tie_word_embeddings:
        weights -= decoder.embed_tokens.weight.nbytes
    kv = 2 * config.num_layers * decoder.kv_heads * config.head_dim * decoder.dtype.itemsize
    return (weights + batch * context * kv) / bytes_per_s * 1e3
