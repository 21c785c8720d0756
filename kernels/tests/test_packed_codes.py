"""Products with quantised weights on a CPU: what the codes mean, and rows that are their own to the bit."""

from __future__ import annotations

import pytest
import torch
from specdec_kernels.linear import codes_linear, native, pack_codes
from specdec_kernels.native import has_int8, library
from specdec_kernels.quantized import QuantizedMatrix

pytestmark = pytest.mark.skipif(library() is None, reason="the C++ kernels could not be compiled here")

#: Kind, inputs that share a scale (0: all), zero points or offsets.
FORMS = [
    ("int4", 32, ""),
    ("int4", 32, "offsets"),
    ("int4", 128, "zeros"),
    ("int4", 0, ""),
    ("int4", 8, "zeros"),
]
FORMS += [("int8", 0, ""), ("int8", 32, ""), ("int8", 64, "zeros"), ("fp8", 0, ""), ("fp8", 128, "")]


def matrix(form, outputs=70, inputs=384, *, half=True, seed=0):
    kind, size, more = form
    generator = torch.Generator().manual_seed(seed)
    groups = inputs // size if size else 1
    made = QuantizedMatrix.random(kind, outputs, inputs, groups, std=inputs**-0.5, generator=generator)
    scales = made.scales.half().float() if half else made.scales
    shape = scales.shape
    zeros = torch.randint(0, 17, shape, generator=generator).float() if more == "zeros" else None
    offsets = -4 * scales if more == "offsets" else None
    order = torch.randperm(inputs, generator=generator) if more == "zeros" else None
    return QuantizedMatrix(
        kind=kind, codes=made.codes, scales=scales, zeros=zeros, offsets=offsets, order=order
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_products_are_those_of_what_the_codes_mean(form, dtype):
    for inputs, half in ((384, True), (384, False), (200, True) if not form[1] else (128, True)):
        made = matrix(form, inputs=inputs, half=half)
        packed = pack_codes(made)
        x = torch.randn(11, inputs, generator=torch.Generator().manual_seed(1)).to(dtype)
        bias = torch.randn(70)
        got = codes_linear(x, packed, bias)
        expected = x.double() @ made.dequantized(torch.float64).T + bias.double()
        rounding = 1e-5 if dtype is torch.float32 else 1.6e-2
        if native.as_bytes(dtype, packed):  # half a step of 127 in each input
            rounding += 0.04
        torch.testing.assert_close(got.double(), expected, atol=rounding, rtol=rounding / 2)
        assert (packed.scales.dtype is torch.float16) == (half and form[2] != "zeros")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_products_of_a_row_are_its_own(form, dtype):
    packed = pack_codes(matrix(form, outputs=150))
    x = torch.randn(37, 384, generator=torch.Generator().manual_seed(2)).to(dtype)
    alone = torch.cat([codes_linear(x[row : row + 1], packed) for row in range(37)])
    for rows in (2, 3, 4, 5, 7, 37):
        together = torch.cat([codes_linear(x[start : start + rows], packed) for start in range(0, 37, rows)])
        assert torch.equal(together, alone), rows


@pytest.mark.skipif(not has_int8(), reason="the processor does not multiply bytes")
def test_what_is_not_finite_spoils_its_row_alone():
    packed = pack_codes(matrix(FORMS[1]))
    x = torch.randn(3, 384).bfloat16()
    x[1, 5] = float("inf")
    got = codes_linear(x, packed)
    assert got[1].isnan().all() and got[[0, 2]].isfinite().all()


def test_groups_that_are_no_multiples_of_a_word():
    with pytest.raises(ValueError, match="groups of 12 inputs"):
        pack_codes(matrix(("int4", 12, "")))


def test_memory():
    """Half a byte a weight, and two in float16 for each 32 of them."""
    packed = pack_codes(matrix(("int4", 32, "offsets"), outputs=64))
    assert packed.num_bytes == 64 * 384 // 2 + 2 * 2 * 64 * 384 // 32
