"""An experiment on Hopper: products with fp8 and int4 weights on the float8 tensor cores, no weight decoded.

    python benchmarks/gpu/float8_products.py --check               the arithmetic, exhaustively; no card
    python benchmarks/gpu/float8_products.py --compile             the main loops' instructions; no card
    python benchmarks/gpu/float8_products.py --json float8.json    errors, bits and times on a card

A bfloat16 has eight significant bits, a float8_e4m3fn four: two of those hold an activation exactly, each in
its own product, added in float32. A row is scaled by a power of two that puts its maximum between 128 and
256; what is less than 2^-13 of that keeps an error of 2^-21 of it at the most. An fp8 weight is an
operand as it lies in memory. An int4 code is one too: as a float8's bits it is the code times 2^-9 (up to 7 a
subnormal, from 8 on the first binade), so decoding is a mask. Its zero is taken off by the sum of the
activations of its group.

A tensor core adds float8 products in fewer bits than float32 has; each 128 inputs are summed so, and added in
float32. How much that is, ``--json`` measures against float64, beside the products in use. Sums run in the
same order in every tile. Times are of the four products of a layer and of splitting their activations, in a
captured graph; what else a layer's products do (norms, rotary, residual) is left out on this side.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from specdec_kernels.gpu import launch
from specdec_kernels.projection.mainloop import prefetch
from specdec_kernels.projection.quantized import _joined
from specdec_kernels.quantized import QuantizedMatrix
from triton.language.extra import cuda

GROUP = 128  # inputs that share a scale of int4, and that a tensor core sums
_PLANE = GROUP // 4
#: Two registers of eight codes -> four of four values; a register of each plane of inputs.
_NIBBLES: tl.constexpr = tl.constexpr("""{
    .reg .b32 a, b;
    shr.u32 a, $4, 4;
    shr.u32 b, $5, 4;
    and.b32 $0, $4, 0x0f0f0f0f;
    and.b32 $1, a, 0x0f0f0f0f;
    and.b32 $2, $5, 0x0f0f0f0f;
    and.b32 $3, b, 0x0f0f0f0f;
}""")


def split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``[M, K]`` bfloat16 -> ``[M, 2, K]`` float8_e4m3fn and ``[M]`` float32: both parts, and their scale.

    A row is ``(first + second / 16) * scale``.
    """
    values = x.float()
    most = values.abs().amax(1)
    exponent = torch.where(most > 0, torch.frexp(most)[1], -118).clamp(-118, 128)
    up = torch.ldexp(torch.ones_like(values[:, 0]), 8 - exponent)
    scaled = values * up[:, None]
    first = scaled.to(torch.float8_e4m3fn)
    second = ((scaled - first.float()) * 16).to(torch.float8_e4m3fn)
    return torch.stack((first, second), 1), 1 / up


def packed(codes: torch.Tensor) -> torch.Tensor:
    """``[N, K]`` int4 codes -> ``[N, K / 4]`` int16: what one mask takes out of two words is of one plane."""
    planes = codes.int().unflatten(1, (-1, 4, _PLANE // 4, 4))
    words = torch.zeros(*planes.shape[:2], _PLANE // 4, 4, dtype=torch.int32, device=codes.device)
    for plane in range(4):
        for i in range(4):
            shift = 4 * (2 * (i % 2) + plane % 2)
            words[..., 2 * (plane // 2) + i // 2] |= planes[:, :, plane, :, i] << shift
    return words.flatten(1).to(torch.int16)


def unpacked(words: torch.Tensor) -> torch.Tensor:
    """Back, by the steps of the kernel: ``[N, K]`` float8_e4m3fn."""
    pairs = words.contiguous().view(torch.int32).unflatten(1, (-1, _PLANE // 4, 2)).unbind(3)
    registers = [pairs[0], pairs[0] >> 4, pairs[1], pairs[1] >> 4]
    masked = torch.stack([register & 0x0F0F0F0F for register in registers], 2)
    return masked.contiguous().view(torch.uint8).flatten(1).view(torch.float8_e4m3fn)


@triton.jit
def split_kernel(X, PARTS, SCALES, SUMS, K: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr):
    """:func:`split` of a row, and the sums of each 128 inputs of what it became."""
    m = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, WIDE)
    if PDL:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    x = tl.load(X + m * K + k, mask=k < K, other=0.0).to(tl.float32)
    exponent = (tl.max(tl.abs(x), 0).to(tl.int32, bitcast=True) >> 23) - 126
    exponent = tl.minimum(tl.maximum(exponent, -118), 128)
    up = (135 - exponent << 23).to(tl.float32, bitcast=True)
    scaled = x * up
    first = scaled.to(tl.float8e4nv)
    second = ((scaled - first.to(tl.float32)) * 16.0).to(tl.float8e4nv)
    tl.store(PARTS + 2 * m * K + k, first, mask=k < K)
    tl.store(PARTS + 2 * m * K + K + k, second, mask=k < K)
    held = first.to(tl.float32) + second.to(tl.float32) * 0.0625
    # a row's program is the same whatever stands beside it, and so is its order of sums
    sums = tl.sum(tl.reshape(held, (WIDE // 128, 128)), 1)
    group = tl.arange(0, WIDE // 128)
    tl.store(SUMS + m * (K // 128) + group, sums, mask=group < K // 128)
    tl.store(SCALES + m, (119 + exponent << 23).to(tl.float32, bitcast=True))


@triton.jit(do_not_specialize=["M"])
def float8_kernel(
    W, PARAMS, PARTS, SCALES, SUMS, PARTIAL, COUNTS, Y, M,
    N: tl.constexpr, K: tl.constexpr, INT4: tl.constexpr, ROWS: tl.constexpr, B: tl.constexpr,
    BK: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``Y = X W^T``; the last of ``SPLIT`` programs, each with a part of the inputs, adds them in order."""
    n, part = tl.program_id(0) // SPLIT, tl.program_id(0) % SPLIT
    LENGTH: tl.constexpr = K // SPLIT
    EACH: tl.constexpr = 4 if INT4 else 1
    WORDS: tl.constexpr = 128 // EACH
    begin = part * LENGTH
    rows = n * ROWS + tl.arange(0, ROWS)
    w = W + rows.to(tl.int64)[:, None] * (K // EACH) + begin // EACH + tl.arange(0, WORDS)[None, :]
    m = tl.program_id(1) * B + tl.arange(0, B)
    there = (m < M)[None, :]
    x = PARTS + m.to(tl.int64)[None, :] * (2 * K) + begin + tl.arange(0, 128)[:, None]
    a = tl.zeros((ROWS, B), tl.float32)
    if PDL:
        if AHEAD:
            prefetch(W + begin // EACH, rows, AHEAD, K // EACH, ROWS, 1, "")
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    for k in tl.range(0, LENGTH, BK, num_stages=STAGES):
        for at in tl.static_range(0, BK, 128):
            weight = tl.load(w + (k + at) // EACH, eviction_policy="evict_first")
            if INT4:
                planes = tl.inline_asm_elementwise(
                    _NIBBLES, "=&r,=&r,=&r,=&r,r,r", [weight],
                    dtype=(tl.float8e4nv, tl.float8e4nv, tl.float8e4nv, tl.float8e4nv), is_pure=True, pack=4,
                )  # fmt: skip
                weight = _joined(planes, 0, 4, ROWS, WORDS)
            first = tl.dot(weight, tl.load(x + k + at, mask=there, other=0.0))
            second = tl.dot(weight, tl.load(x + K + k + at, mask=there, other=0.0))
            sums = tl.fma(second, tl.full((ROWS, B), 0.0625, tl.float32), first)
            if INT4:
                group = (begin + k + at) // 128
                word = tl.load(PARAMS + group * N + rows)
                scale = (word & -256).to(tl.float32, bitcast=True) * 512.0
                zero = (word & 0x7F).to(tl.float32) * -0.001953125
                inputs = tl.load(SUMS + m * (K // 128) + group, mask=m < M, other=0.0)
                zeros = tl.broadcast_to(zero[:, None], (ROWS, B))
                sums = tl.fma(zeros, tl.broadcast_to(inputs[None, :], (ROWS, B)), sums)
                a = tl.fma(sums, tl.broadcast_to(scale[:, None], (ROWS, B)), a)
            else:
                a += sums
    at_y = m.to(tl.int64)[None, :] * N + rows[:, None]
    if SPLIT > 1:
        tl.store(PARTIAL + part.to(tl.int64) * M * N + at_y, a, mask=there)
        tl.debug_barrier()
        count = COUNTS + n * tl.num_programs(1) + tl.program_id(1)
        if tl.atomic_add(count, 1) == SPLIT - 1:
            a = tl.load(PARTIAL + at_y, mask=there, other=0.0, cache_modifier=".cg")
            for other in tl.static_range(1, SPLIT):
                a += tl.load(
                    PARTIAL + tl.cast(other, tl.int64) * M * N + at_y,
                    mask=there,
                    other=0.0,
                    cache_modifier=".cg",
                )
            _store(a, PARAMS, SCALES, Y, rows, m, M, at_y, INT4)
            tl.store(count, 0)
    else:
        _store(a, PARAMS, SCALES, Y, rows, m, M, at_y, INT4)


@triton.jit
def _store(a, PARAMS, SCALES, Y, rows, m, M, at_y, INT4: tl.constexpr):
    a *= tl.load(SCALES + m, mask=m < M, other=0.0)[None, :]
    if not INT4:
        a *= tl.load(PARAMS + rows)[:, None]
    tl.store(Y + at_y, a, mask=(m < M)[None, :])


@dataclass(frozen=True)
class Cut:
    """How a product is cut; none but ``split``, which the shape decides, changes a bit."""

    rows: int
    inputs: int
    split: int
    stages: int
    warps: int
    ahead: int = 512


#: Those tried, by whether a matrix has many outputs.
CUTS = {
    True: [Cut(128, 128, 1, 5, 4), Cut(128, 256, 1, 3, 4), Cut(64, 256, 1, 4, 4), Cut(128, 256, 1, 3, 8)],
    False: [Cut(64, 256, 4, 3, 4), Cut(128, 128, 4, 5, 4), Cut(128, 256, 4, 3, 4), Cut(64, 128, 4, 6, 4)],
}
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
LAYERS = 32


class Product:
    def __init__(self, kind: str, outputs: int, inputs: int, device: str, seed: int = 0) -> None:
        self.int4, self.shape = kind == "int4", (outputs, inputs)
        groups = inputs // GROUP if self.int4 else 1
        self.matrix: QuantizedMatrix | None = None
        if device == "meta":
            stored = (outputs, inputs // 4 if self.int4 else inputs)
            self.words = torch.empty(
                stored, dtype=torch.int16 if self.int4 else torch.float8_e4m3fn, device=device
            )
            self.params = torch.empty(
                (groups, outputs), dtype=torch.int32 if self.int4 else torch.float32, device=device
            )
        else:
            generator = torch.Generator(device).manual_seed(seed)
            self.matrix = QuantizedMatrix.random(
                kind,
                outputs,
                inputs,
                groups,
                std=inputs**-0.5,
                generator=generator,  # type: ignore[arg-type]
            )
            self.matrix.scales.copy_(self.matrix.scales.bfloat16())
            params = self.matrix.scales.T.contiguous()
            self.params = params.view(torch.int32) | 8 if self.int4 else params[0]
            self.words = packed(self.matrix.codes) if self.int4 else self.matrix.codes
        self.counts = torch.zeros(outputs, dtype=torch.int32, device=device)
        self.partial = torch.empty((4, 64, outputs), device=device)

    def __call__(self, x: torch.Tensor, cut: Cut, parts: Any = None) -> torch.Tensor:
        tokens, (outputs, inputs) = x.shape[0], self.shape
        parts, scales, sums = parts or split_on_device(x)
        y = x.new_empty(tokens, outputs)
        wide = 16 if tokens <= 16 else 32
        launch(
            float8_kernel,
            (outputs // cut.rows * cut.split, -(-tokens // wide)),
            *(self.words, self.params, parts, scales, sums, self.partial, self.counts, y, tokens),
            N=outputs, K=inputs, INT4=self.int4, ROWS=cut.rows, B=wide, BK=cut.inputs, SPLIT=cut.split,
            STAGES=cut.stages, AHEAD=cut.ahead, num_warps=cut.warps, num_stages=cut.stages,
        )  # fmt: skip
        return y


def split_on_device(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens, inputs = x.shape
    parts = torch.empty((tokens, 2, inputs), dtype=torch.float8_e4m3fn, device=x.device)
    scales, sums = x.new_empty(tokens, dtype=torch.float32), x.new_empty(tokens, inputs // GROUP).float()
    wide = triton.next_power_of_2(inputs)
    launch(
        split_kernel, (tokens,), x, parts, scales, sums, K=inputs, WIDE=wide, num_warps=min(16, wide // 512)
    )
    return parts, scales, sums


def cuts(name: str) -> list[Cut]:
    return CUTS[SHAPES[name][0] > 16384]


def check() -> None:
    """The split of every bfloat16, whatever the power of two of its row's maximum; int4 codes and back."""
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    every = every[every.isfinite()]
    for exponent in range(-126, 128):
        top = torch.tensor(2.0**exponent * 1.9921875, dtype=torch.float64).bfloat16()
        row = torch.cat((every[every.abs() <= top], top[None]))
        parts, scale = split(row[None])
        back = (parts[0, 0].double() + parts[0, 1].double() / 16) * scale.double()
        error = (back - row.double()).abs()
        if exponent >= -111:  # below, bfloat16 itself has no smaller numbers to hold
            assert error[row.abs().double() >= 2.0 ** (exponent - 13)].max() == 0, exponent
        assert error.max() <= 2.0 ** (exponent - 21), (exponent, error.max())
    codes = torch.randint(16, (64, 512), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(unpacked(packed(codes)).double() * 512, codes.double())
    print(f"{len(every)} numbers by 254 maxima, and codes: exact, or within 2^-21 of the maximum")


def compiled(kind: str, name: str, cut: Cut, tokens: int, inspect: bool) -> str:
    """A kernel's main loop (0.00: unrolled); in a process of its own, which fills Triton's cache."""
    from specdec_kernels.gpu.compiling import compiling_only, meta

    with compiling_only(inspect=inspect) as kernels:
        Product(kind, *SHAPES[name], "meta")(meta(tokens, SHAPES[name][1], dtype=torch.bfloat16), cut)
    found, each = kernels[-1], 32 * cut.warps / (cut.rows * cut.inputs)
    return (
        f"{kind:5s}{name:8s}{tokens:3d} {cut}: {sum(found.loop.values()) * each:.2f} a weight, "
        f"{found.registers} registers, {found.stack} stack, {found.shared >> 10} KiB, "
        f"{found.overwritten} overwritten"
    )


def compile_all(*, inspect: bool) -> list[str]:
    cases = [
        (kind, name, cut, count, inspect)
        for kind in ("fp8", "int4")
        for name in SHAPES
        for cut in cuts(name)
        for count in (16, 32)
    ]
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        return pool.starmap(compiled, cases, 1)


def errors(kind: str, name: str) -> dict[str, Any]:
    """Errors' root mean square and mean by the results' size, of this way and of that in use; bits."""
    from specdec_kernels.projection import gpu
    from specdec_kernels.quantized import words_of

    product = Product(kind, *SHAPES[name], "cuda", 3)
    assert product.matrix is not None
    x = torch.randn(32, SHAPES[name][1], device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    x = (x + 0.5).bfloat16()  # sums that are not of zero mean show where a tensor core cuts off
    want = x.double() @ product.matrix.dequantized(torch.float64).T
    size = want.std()
    found: dict[str, Any] = {"kind": kind, "product": name}
    wild = (x * torch.randn_like(x, dtype=torch.float32).mul(4).exp()).bfloat16()
    pairs = zip(split(wild), split_on_device(wild), strict=False)
    found["same split"] = all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)
    results = [product(x, cut) for cut in cuts(name)]
    rows = torch.cat([product(x[i : i + 1], cuts(name)[0]) for i in range(32)])
    found["same bits"] = all(torch.equal(results[0], other) for other in [*results, rows])
    for way, got in (("float8", results[0]), ("in use", gpu.product(x, words_of(product.matrix), None))):
        off = got.double() - want
        found[f"{way} rms"] = float(off.square().mean().sqrt() / size)
        found[f"{way} bias"] = float((off * want.sign()).mean() / size)
    return found


def times(kind: str, tokens: int) -> list[dict[str, Any]]:
    """Each product by its best cut, on weights that no cache holds, and all four with their splits."""
    from timing import captured, device_ms

    found, best, all_bytes = [], {}, 0
    for name, (outputs, inputs) in SHAPES.items():
        copies = [Product(kind, outputs, inputs, "cuda", seed) for seed in range(6 if outputs < 8000 else 3)]
        x = torch.randn(tokens, inputs, device="cuda").bfloat16()
        parts = split_on_device(x)
        size = copies[0].words.nbytes + copies[0].params.nbytes
        all_bytes += size
        for cut in cuts(name):
            work = captured(lambda: [copy(x, cut, parts) for copy in copies])  # noqa: B023  it is run here
            us = device_ms(work, repeats=9) * 1e3 / len(copies)
            found.append({"kind": kind, "tokens": tokens, "product": name, "cut": str(cut), "us": us})
            found[-1]["TB/s"] = size / us / 1e6
            if name not in best or us < best[name][0]:
                best[name] = us, cut, copies, x
        print(*found[-len(cuts(name)) :], sep="\n", flush=True)

    def layers() -> None:
        for turn in range(3):
            for _, cut, copies, x in best.values():
                copies[turn](x, cut)

    us = device_ms(captured(layers), repeats=9) * 1e3 / 3
    whole = {"kind": kind, "tokens": tokens, "product": "layer with splits", "us": us}
    found.append({**whole, "TB/s": all_bytes / us / 1e6, f"ms of {LAYERS}": us * LAYERS / 1e3})
    print(found[-1], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tokens", default="1,8,32")
    options = parser.parse_args()
    if options.check:
        return check()
    lines = compile_all(inspect=options.compile)
    if options.compile:
        return print(*lines, sep="\n")
    found: list[dict[str, Any]] = []
    for kind in ("fp8", "int4"):
        for name in ("qkv", "gate_up", "down"):
            found.append(errors(kind, name))
            print(found[-1], flush=True)
    for kind in ("fp8", "int4"):
        for tokens in map(int, options.tokens.split(",")):
            found += times(kind, tokens)
            if options.json:
                options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
