"""Mixtures of experts compile for Hopper, with no card near: few tokens leave room for a second program."""

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
#: Hidden and inner width, experts, and how many a token takes.
A3B, MIXTRAL, ODD = (2048, 768, 128, 8), (4096, 14336, 8, 2), (100, 36, 5, 3)
#: Shape, dtype, tokens
QUICK = [(A3B, "bfloat16", 1), (A3B, "bfloat16", 192), (ODD, "float32", 20)]
SWEEP = [
    (shape, dtype, tokens)
    for shape in (A3B, MIXTRAL, ODD)
    for dtype in ("bfloat16", "float32")
    for tokens in (1, 16, 48, 64, 192, 600, 4096)
]
NAMES = {"router", "choose", "group", "expert_gate_up", "expert_down", "combine"}


def run(shape, dtype, tokens):
    """A layer's mixture on tensors without memory."""
    from specdec_kernels.experts import gpu
    from specdec_kernels.gpu.compiling import meta
    from specdec_kernels.projection import Stream

    (hidden, inner, experts, count), dtype = shape, getattr(torch, dtype)
    parts = -(-hidden // 64), -(-tokens // 16) * 16
    stream = Stream(*[meta(tokens, hidden, dtype=dtype)] * 2, meta(*parts, dtype=torch.float32))
    gpu.add_experts(
        stream,
        meta(experts, hidden, dtype=dtype),
        meta(experts, 2 * inner, hidden, dtype=dtype),
        meta(experts, hidden, inner, dtype=dtype),
        meta(hidden, dtype=dtype),
        eps=1e-5,
        count=count,
        normalize=True,
        activation="silu",
    )


def compiled(cases):
    """The cases' kernels; compiled in a process of its own, as they are interpreted here."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, __file__], input=json.dumps(cases), env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(kernels):
    for kernel in kernels:
        assert kernel["overwritten"] == 0, kernel
        assert kernel["stack"] <= (0 if kernel["dtype"] == "bfloat16" else 64), kernel
        programs = 2 if kernel["tokens"] <= 192 and kernel["dtype"] == "bfloat16" else 1
        if kernel["hidden"] == A3B[0]:
            assert programs * (kernel["shared"] + RESERVED) <= SHARED, kernel
        assert kernel["shared"] + RESERVED <= SHARED, kernel


def test_kernels_in_use_compile():
    kernels = compiled(QUICK)
    assert {kernel["name"].removesuffix("_kernel") for kernel in kernels} == NAMES
    check(kernels)


@pytest.mark.sweep
def test_every_shape_compiles():
    check(compiled(SWEEP))


if __name__ == "__main__":
    from specdec_kernels.gpu.compiling import compiling_only

    for shape, dtype, tokens in json.loads(sys.stdin.read()):
        with compiling_only() as kernels:
            run(shape, dtype, tokens)
        told = {"hidden": shape[0], "dtype": dtype, "tokens": tokens}
        for kernel in kernels:
            print(json.dumps(asdict(kernel) | told), flush=True)
