"""Kernels compile for Hopper, with no card near: registers, shared memory, tensor core instructions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace

import pytest
import torch

pytest.importorskip("triton")

#: Shared memory that a program may have on Hopper.
SHARED = 232448
#: Hidden, inner, query heads, KV heads, their dimensions, vocabulary, whether heads are normed.
LLAMA_8B = (4096, 14336, 32, 8, 128, 128256, False)
SHAPES = {
    "llama-8b": LLAMA_8B,
    "llama-1b": (2048, 8192, 32, 8, 64, 128256, False),
    "qwen3-8b": (4096, 12288, 32, 8, 128, 151936, True),
    "qwen2.5-7b": (3584, 18944, 28, 4, 128, 152064, False),
    "smollm2": (576, 1536, 9, 3, 64, 49152, False),
    "tiny": (48, 100, 3, 1, 24, 512, True),
}
QUICK = [("llama-8b", torch.bfloat16, 1), ("llama-8b", torch.bfloat16, 192), ("tiny", torch.float32, 17)]
#: Loaded in other ways than by the tiles in use.
ADAPTED = [("llama-8b", torch.bfloat16, tokens, "adapted") for tokens in (1, 64)]
LOADED = [("llama-8b", torch.bfloat16, 1, "early"), ("llama-8b", torch.bfloat16, 128, "boxes")]
#: Products that are summed over ranks.
SHARED_OUT = [("llama-8b", torch.bfloat16, tokens, "ranks") for tokens in (1, 192)]
#: Of weights that stay quantised.
QUANTISED = [("llama-8b", torch.bfloat16, 1, "int4-128"), ("smollm2", torch.bfloat16, 32, "fp8")]
QUANTISED += [("smollm2", torch.bfloat16, 192, "int4"), ("smollm2", torch.bfloat16, 48, "int8")]
#: By the tiles that multiply by ``mma.sync``: two warps, or parts as a batch.
BATCH = [("llama-8b", torch.bfloat16, 16, label, "batch") for label in ("fp8", "int4-128", "int8")]
SWEEP = [
    (name, dtype, tokens)
    for dtype in (torch.bfloat16, torch.float32)
    for name in SHAPES
    for tokens in (1, 32, 48, 64, 96, 128, 192, 256, 512, 8192)
]


def compile_adapted_layer(shape, dtype, tokens):
    """Compile a model's products to which adapters add, and what makes their additions."""
    from specdec_kernels.gpu.compiling import meta
    from specdec_kernels.lora.gpu import lora_delta
    from specdec_kernels.projection import gpu

    hidden, inner, heads, kv_heads, dim, vocabulary, _ = shape
    integers, table = meta(tokens, dtype=torch.int64), meta(512, dim // 2, dtype=torch.float32)
    cache, gain = meta(9, 16, kv_heads, dim, dtype=dtype), meta(hidden, dtype=dtype)

    def delta(x, *parts):
        width = x.shape[1]
        stacks = meta(8, len(parts) * 16, width, dtype=dtype), meta(8, sum(parts), 16, dtype=dtype)
        return meta(sum(parts), width, dtype=dtype), lora_delta(x, *stacks, integers, parts)

    stream = gpu.embed(integers, meta(vocabulary, hidden, dtype=dtype), gain)
    weight, added = delta(stream.scaled, heads * dim, kv_heads * dim, kv_heads * dim)
    query = gpu.project_qkv(
        stream, weight, None, eps=1e-5, cos=table, sin=table, positions=integers, write_slots=integers,
        key_cache=cache, value_cache=cache, query_gain=None, key_gain=None, rotate=True, delta=added,
    )  # fmt: skip
    weight, added = delta(query.flatten(1), hidden)
    stream = gpu.add_product(query.flatten(1), weight, None, stream, gain, delta=added)
    weight, added = delta(stream.scaled, inner, inner)
    gated = gpu.project_gate_up(stream, weight, None, eps=1e-5, activation="silu", delta=added)
    weight, added = delta(gated, hidden)
    gpu.add_product(gated, weight, None, stream, gain, delta=added)


def compile_sums_over_ranks(shape, dtype, tokens):
    """Compile what one rank of two has of a model's row-parallel products, and sums alone."""
    from specdec_kernels.gpu.compiling import meta
    from specdec_kernels.projection import Stream, gpu
    from specdec_kernels.ranks import Mail, sum_over_ranks

    hidden, inner, heads, _, dim, *_ = shape
    mail, of_four = (Mail(meta(4 + ranks, dtype=torch.int64), ranks, 1 << 18) for ranks in (2, 4))
    gain = meta(hidden, dtype=dtype)
    stream = Stream.empty(tokens, hidden, gain)
    for inputs in (heads * dim // 2, inner // 2):
        x, weight = meta(tokens, inputs, dtype=dtype), meta(hidden, inputs, dtype=dtype)
        gpu.add_product(x, weight, None, stream, gain, mail=mail)
    for summed in (mail, of_four):
        sum_over_ranks(stream.residual, summed)
        sum_over_ranks(stream.residual.float(), summed)
    gpu.add_product(x[:16], weight, None, Stream.empty(len(x[:16]), hidden, gain), gain, mail=of_four)


def quantised(label, outputs, inputs):
    """Weights that stay quantised, without memory: ``int4-128`` are groups of 128 inputs."""
    from specdec_kernels.gpu.compiling import meta
    from specdec_kernels.quantized import WordMatrix

    kind, _, size = label.partition("-")
    groups = inputs // int(size) if size else 1
    params = torch.int32 if kind == "int4" else torch.float32
    words = meta(outputs, -(-inputs // 128) * (32 if kind == "int4" else 64), dtype=torch.int16)
    return WordMatrix(kind=kind, words=words, params=meta(groups, outputs, dtype=params), inputs=inputs)


def compile_layer(shape, dtype, tokens, label=""):
    """Compile a model's products of ``tokens`` tokens, and the small kernels of its unfused path.

    ``label``: of weights that stay quantised.
    """
    from specdec_kernels.activation import gpu as activation
    from specdec_kernels.gpu.compiling import meta
    from specdec_kernels.norm import gpu as norm
    from specdec_kernels.projection import Stream, gpu

    def weights(outputs, inputs):
        return quantised(label, outputs, inputs) if label else meta(outputs, inputs, dtype=dtype)

    hidden, inner, heads, kv_heads, dim, vocabulary, head_norm = shape
    gain = meta(hidden, dtype=dtype)
    integers = meta(tokens, dtype=torch.int64)
    table = meta(512, dim // 2, dtype=torch.float32)
    cache = meta(9, 16, kv_heads, dim, dtype=dtype)
    head_gain = meta(dim, dtype=dtype) if head_norm else None
    stream = gpu.embed(integers, meta(vocabulary, hidden, dtype=dtype), gain)
    stream = gpu.add(meta(2, tokens, hidden, dtype=dtype), stream, gain)
    query = gpu.project_qkv(
        stream,
        weights((heads + 2 * kv_heads) * dim, hidden),
        None,
        eps=1e-5,
        cos=table,
        sin=table,
        positions=integers,
        write_slots=integers,
        key_cache=cache,
        value_cache=cache,
        query_gain=head_gain,
        key_gain=head_gain,
        rotate=True,
    )
    stream = gpu.add_product(query.flatten(1), weights(hidden, heads * dim), None, stream, gain)
    weight = weights(2 * inner, hidden)
    for act in ("silu", "gelu_tanh"):
        gated = gpu.project_gate_up(stream, weight, None, eps=1e-5, activation=act)
    stream = gpu.add_product(gated, weights(hidden, inner), gain, stream, gain)
    gathered = gpu.gather([stream.residual] * 3, integers)
    gpu.product(gathered, meta(hidden, 3 * hidden, dtype=dtype), None)
    parts = meta(vocabulary, hidden, dtype=dtype), stream.residual
    joined = gpu.join(integers, *parts, table_gain=gain, feature_gain=gain, eps=1e-5, rows=integers)
    gpu.project_qkv(
        Stream(stream.residual, joined, None),
        meta((heads + 2 * kv_heads) * dim, 2 * hidden, dtype=dtype),
        None,
        eps=1e-5,
        cos=table,
        sin=table,
        positions=integers,
        write_slots=integers,
        key_cache=cache,
        value_cache=cache,
        query_gain=None,
        key_gain=None,
        rotate=True,
    )
    gpu.normalize(stream, gain, 1e-5, integers)
    gpu.product(gpu.normalize(stream, gain, 1e-5), meta(vocabulary, hidden, dtype=dtype), None)
    norm.fused_add_rms_norm(norm.rms_norm(stream.residual, gain, 1e-5), stream.residual, gain, 1e-5)
    activation.silu_and_mul(meta(tokens, 2 * inner, dtype=dtype))
    activation.gelu_tanh_and_mul(meta(tokens, 2 * inner, dtype=dtype))


def load_by(how):
    """Tiles that ask early for what they add, as they are otherwise; or others."""
    from specdec_kernels.projection import gpu, tiles

    chosen, boxes = tiles.choose, gpu.boxes

    def some(*wanted):
        found = boxes(*wanted)
        assert found is not None, wanted
        return found

    if how == "batch":
        two, batch = tiles.Tile(64, (16, 0), 256, 3, 2), tiles.Tile(32, (16, 0), 256, 3, 4, batch=True)
        words = {"gate_up": two, "qkv": batch, "add": batch}
        tiles.choose = lambda kind, *wanted: words.get(kind) if len(wanted) > 5 else chosen(kind, *wanted)
    elif how == "early":
        tiles.choose = lambda *wanted: replace(chosen(*wanted), early=True)
    else:
        tiles.choose = lambda *_: tiles.Tile(128, (128, 0), 64, 5, 8, boxes=True)
        gpu.boxes = some


def compiled(cases):
    """What the kernels of ``cases`` need; compiled in a process of its own, as they are interpreted here."""
    lines = [
        " ".join((name, str(dtype).removeprefix("torch."), str(tokens), *how))
        for name, dtype, tokens, *how in cases
    ]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, __file__], input="\n".join(lines), env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check_limits(kernels):
    for kernel in kernels:
        assert kernel["shared"] <= SHARED, kernel
        assert kernel["overwritten"] == 0, kernel


def check(kernels):
    check_limits(kernels)
    for kernel in kernels:
        if kernel["tokens"] <= 256 and kernel["dtype"] == "bfloat16":  # what decoding and verification run
            assert kernel["stack"] <= 32, kernel  # a word a thread: the tile is the fastest all the same


def test_kernels_in_use_compile():
    kernels = compiled(QUICK)
    names = {kernel["name"].lstrip("_") for kernel in kernels}
    assert names == {
        *(
            "add_kernel",
            "add_norm_kernel",
            "add_terms_kernel",
            "embed_kernel",
            "gate_kernel",
            "gate_up_kernel",
        ),
        *("norm_kernel", "normalize_kernel", "product_kernel", "qkv_kernel"),
        *("gather_kernel", "join_kernel"),
    }
    check(kernels)


def test_kernels_that_load_otherwise_compile():
    kernels = compiled(LOADED)
    assert {kernel["tokens"] for kernel in kernels} == {1, 128}
    check_limits(kernels)
    for kernel in kernels:
        assert kernel["stack"] <= 64, kernel  # none is in use before it is measured


def test_kernels_of_adapters_compile():
    kernels = compiled(ADAPTED)
    names = {kernel["name"] for kernel in kernels}
    assert names >= {"shrink_kernel", "expand_kernel", "qkv_kernel", "gate_up_kernel", "add_kernel"}
    check(kernels)


def test_kernels_that_sum_over_ranks_compile():
    kernels = compiled(SHARED_OUT)
    assert {kernel["name"] for kernel in kernels} == {"add_kernel", "sum_kernel"}
    check(kernels)


def test_kernels_of_quantised_weights_compile():
    kernels = compiled(QUANTISED)
    assert {kernel["tokens"] for kernel in kernels} == {1, 32, 48, 192}
    check(kernels)


def test_kernels_that_decode_beside_the_products_compile():
    """None of their products is waited for; weights come in few instructions, and stay in their registers."""
    kernels = [kernel for kernel in compiled(BATCH) if kernel["shared"] and kernel["loop"].get("tensor")]
    check(kernels)
    for name, lanes in (("add_kernel", 128), ("qkv_kernel", 128), ("gate_up_kernel", 64)):
        found = [kernel for kernel in kernels if kernel["name"] == name]
        weights = 128 * 256 if lanes == 128 else 64 * 256
        # parts of a matrix without quantised weights are not a batch
        loops = [kernel["loop"] for kernel in found if kernel["loop"]["tensor"] >= 64]
        assert len(loops) >= 3
        for loop in loops:
            assert sum(loop.values()) * lanes / weights < 2.7, (name, loop)


def test_what_is_in_a_main_loop():
    from specdec_kernels.gpu.sass import main_loop

    lines = ["LOP3.LUT R1, R2", "HMMA.16816.F32.BF16 R4, R8, R12, R4", "@P0 BRA 0x0", "EXIT", "BRA 0x30"]
    text = "\n".join(f"        /*{16 * i:04x}*/    {line} ;   /* 0x0 */" for i, line in enumerate(lines))
    assert main_loop(text) == {"logic": 1, "tensor": 1, "other": 1}
    assert main_loop(text.replace("HMMA", "FFMA")) == {}


@pytest.mark.parametrize("kind", ["HGMMA.64x64x16.F32.BF16", "QGMMA.64x16x32.F32.E4M3.E4M3"])
def test_what_is_written_under_a_product(kind):
    """Of products that go on: what their operands are in is free when they are waited for, and not before."""
    from specdec_kernels.gpu.sass import overwritten

    def listed(*lines):
        return "\n".join(f"        /*{16 * i:04x}*/    {line} ;   /* 0x0 */" for i, line in enumerate(lines))

    product, wait = f"{kind} R24, R56, gdesc[UR8], R24, gsb0", "WARPGROUP.DEPBAR.LE gsb0, 0x0"
    write = "LDSM.16.M88.4 R52, [R9]", "@P1 LDSM.16.M88.4 R56, [R9+UR4]"
    assert overwritten(listed(*write, product, write[0], "STS [R57], R3", wait, *write)) == []
    assert overwritten(listed(product, *write, wait)) == [write[1].removeprefix("@P1 ")]
    assert overwritten(listed("SHF.L.U32 R59, R12, 0x4, RZ", product, "@!P2 BRA 0x0", wait)) == [
        "SHF.L.U32 R59, R12, 0x4, RZ"
    ]
    assert (
        overwritten(listed(product, product.replace("R56", "R60"), wait.replace("0x0", "0x1"), *write)) == []
    )


@pytest.mark.sweep
@pytest.mark.parametrize(
    "label", ["int4", "int4-128", "int4-32", "int4-64", "fp8", "fp8-128", "int8", "int8-64"]
)
def test_kernels_of_every_kind_of_quantised_weights_compile(label):
    check_limits(compiled([("llama-8b", torch.bfloat16, n, label) for n in (1, 32, 48, 64, 192, 8192)]))


@pytest.mark.sweep
@pytest.mark.parametrize("name", SHAPES)
def test_kernels_of_every_shape_compile(name):
    check(compiled([case for case in SWEEP if case[0] == name]))


if __name__ == "__main__":
    from specdec_kernels.gpu.compiling import compiling_only

    for line in sys.stdin:
        name, dtype, tokens, *how = line.split()
        label = ""
        for flag in how:
            if flag in ("early", "boxes", "batch"):
                load_by(flag)
            elif flag not in ("adapted", "ranks"):
                label = flag
        with compiling_only() as kernels:
            if "adapted" in how:
                compile_adapted_layer(SHAPES[name], getattr(torch, dtype), int(tokens))
            elif "ranks" in how:
                compile_sums_over_ranks(SHAPES[name], getattr(torch, dtype), int(tokens))
            else:
                compile_layer(SHAPES[name], getattr(torch, dtype), int(tokens), label)
        for kernel in kernels:
            print(
                json.dumps({**asdict(kernel), "shape": name, "dtype": dtype, "tokens": int(tokens)}),
                flush=True,
            )
