"""Distillation in Triton against its reference."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from specdec_kernels.distillation import gpu, reference

CARD = torch.cuda.is_available()
DEVICE = "cuda" if CARD else "cpu"
DTYPES = [torch.float32, torch.bfloat16] if CARD else [torch.float32]


def case(count, size, dtype, scale=8.0):
    def randn(*shape, seed):
        values = torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed))
        return (values * scale).to(DEVICE, dtype)

    logits, laws = randn(count, size, seed=0), randn(count + 2, size, seed=1)
    rows = torch.arange(count, device=DEVICE).flip(0) + 1
    laws[rows[::3]] = logits[::3]  # some agree
    weights = torch.rand(count, generator=torch.Generator("cpu").manual_seed(2)).to(DEVICE)
    weights[1::4] = 0.0
    return logits, laws, rows, weights


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 100, 2048, 5001])
def test_losses_slopes_and_agreement(size, dtype):
    logits, laws, rows, weights = case(7, size, dtype)
    expected, got = logits.clone(), logits.clone()
    losses, agree = reference.distill_(expected, laws, rows, weights)
    found, agreed = gpu.distill_(got, laws, rows, weights)
    torch.testing.assert_close(found, losses, atol=1e-5, rtol=1e-5)
    assert agreed.tolist() == agree.tolist()
    near = 1e-6 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(got.float(), expected.float(), atol=near, rtol=near)


def test_logits_far_apart_and_blocks_in_any_order():
    """The likeliest token may stand in any block, and far above or below what came before."""
    size = 3 * 2048
    for place in (0, 2048, size - 1):
        logits = torch.full((1, size), -300.0, device=DEVICE)
        laws = torch.linspace(-1e4, 1e4, size, device=DEVICE)[None].roll(place)
        logits[0, place] = 300.0
        rows, weights = torch.zeros(1, dtype=torch.int64, device=DEVICE), torch.ones(1, device=DEVICE)
        expected, got = logits.clone(), logits.clone()
        losses, agree = reference.distill_(expected, laws, rows, weights)
        found, agreed = gpu.distill_(got, laws, rows, weights)
        torch.testing.assert_close(found, losses)
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)
        assert agreed.tolist() == agree.tolist()


def test_of_tokens_equally_likely_the_first_counts():
    logits, laws = (torch.zeros(1, 5000, device=DEVICE) for _ in range(2))
    logits[0, [4000, 70]], laws[0, [3000, 70]] = 1.0, 2.0
    rows = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    assert gpu.distill_(logits, laws, rows, torch.ones(1, device=DEVICE))[1].tolist() == [True]


def test_no_rows():
    rows = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    losses, agree = gpu.distill_(
        torch.zeros(0, 9, device=DEVICE),
        torch.zeros(3, 9, device=DEVICE),
        rows,
        torch.zeros(0, device=DEVICE),
    )
    assert losses.shape == agree.shape == (0,)
