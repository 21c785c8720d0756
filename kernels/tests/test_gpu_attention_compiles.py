"""Attention compiles for Hopper, with no card near: two programs fit on an SM, and registers hold out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict

import pytest
import torch

pytest.importorskip("triton")

#: Shared memory of an SM of Hopper, and what each program on it takes besides its own.
SHARED, RESERVED = 228 << 10, 1 << 10
#: Query heads, KV heads and their dimensions.
LLAMA_8B, QWEN_7B, QWEN_06B, SMOLLM = (32, 8, 128), (28, 4, 128), (16, 8, 128), (9, 3, 64)
GEMMA, TINY = (8, 4, 256), (4, 2, 24)
#: Shape, dtype, rows, tokens a row, tree slots a token, mode, window
DECODE = [
    *((LLAMA_8B, "bfloat16", 8, tokens, 0, mode, None) for tokens in (1, 6) for mode in (0, 1, 2)),
    (LLAMA_8B, "bfloat16", 8, 6, 4, 1, None),
    *((shape, "bfloat16", 8, 1, 4, 2, window) for shape in (LLAMA_8B, SMOLLM) for window in (None, 4096)),
    (LLAMA_8B, "bfloat16", 8, 1, 0, 0, 4096),
]
FLOAT32 = [(SMOLLM, "float32", 2, 3, 0, 0, None)]
SWEEP = [
    (shape, dtype, 8, tokens, entries, mode, window)
    for shape in (LLAMA_8B, QWEN_7B, QWEN_06B, SMOLLM, GEMMA, TINY)
    for dtype in ("bfloat16", "float32")
    for tokens, entries in ((1, 0), (6, 0), (6, 4))
    for mode in (0, 1, 2)
    for window in (None, 4096)
]


def attend(shape, dtype, rows, tokens, entries, mode, window):
    """One call on tensors without memory."""
    from specdec_kernels.attention import AttentionMetadata, gpu
    from specdec_kernels.gpu.compiling import meta

    heads, kv_heads, dim = shape
    dtype = getattr(torch, dtype)
    integers = meta(rows * tokens, dtype=torch.int64)
    step = AttentionMetadata(
        *[integers] * 4,
        meta(rows, 512, dtype=torch.int64),
        16,
        extra=meta(rows * tokens, entries, dtype=torch.int64) if entries else None,
        tokens_per_row=tokens,
    )
    cache = meta(99, 16, kv_heads, dim, dtype=dtype)
    query = meta(rows * tokens, heads, dim, dtype=dtype)
    gpu.paged_attention(query, cache, cache, step, scale=0.1, window=window, mode=mode)


def compiled(cases):
    """What each case's kernel needs; compiled in a process of its own, as they are interpreted here."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, __file__], input=json.dumps(cases), env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_decode_kernels_leave_room_for_a_second_program():
    kernels = compiled(DECODE)
    assert len(kernels) == len(DECODE)
    for kernel, case in zip(kernels, DECODE, strict=True):
        assert 2 * (kernel["shared"] + RESERVED) <= SHARED, (case, kernel)
        assert kernel["stack"] <= 64 and kernel["overwritten"] == 0, (case, kernel)


def test_float32_compiles():
    (kernel,) = compiled(FLOAT32)
    assert kernel["shared"] <= SHARED - RESERVED


@pytest.mark.sweep
def test_every_shape_compiles():
    for kernel, case in zip(compiled(SWEEP), SWEEP, strict=True):
        assert kernel["shared"] <= SHARED - RESERVED, (case, kernel)


if __name__ == "__main__":
    from specdec_kernels.gpu.compiling import compiling_only

    for case in json.loads(sys.stdin.read()):
        with compiling_only() as kernels:
            attend(*case)
        print(json.dumps(asdict(kernels[0])), flush=True)
