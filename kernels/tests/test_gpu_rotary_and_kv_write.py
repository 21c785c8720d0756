"""Triton kernels of rotary embedding and KV writes against their torch references."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from specdec_kernels.kv_write import gpu as kv_gpu
from specdec_kernels.kv_write import move_slots, rotate_and_write_kv, write_kv
from specdec_kernels.kv_write import reference as kv_reference
from specdec_kernels.rotary import gpu as rotary_gpu
from specdec_kernels.rotary import reference as rotary_reference
from specdec_kernels.rotary import rotate

ON_A_CARD = torch.cuda.is_available()
DEVICE = "cuda" if ON_A_CARD else "cpu"
pytestmark = pytest.mark.parametrize("dtype", [torch.float32, *([torch.bfloat16] if ON_A_CARD else [])])


@pytest.fixture
def randn(dtype):
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=generator).to(DEVICE, dtype)


def rotation(tokens, half):
    angles = torch.rand(tokens, half, device=DEVICE) * 6
    return angles.cos(), angles.sin()


def close(got, want):
    tolerance = 1e-6 if got.dtype is torch.float32 else 1e-2
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("dim", "half"), [(16, 8), (24, 12), (20, 6), (128, 64)])
def test_rotated_heads_equal_the_reference(randn, dim, half):
    heads = randn(3, 7, dim + 4)[:, 1:6, :dim]  # a view: heads are apart
    cos, sin = rotation(3, half)
    assert rotary_gpu.can_rotate(heads, cos, sin)
    close(rotate(heads, cos, sin), rotary_reference.rotate(heads, cos, sin))


def test_a_fused_projection_is_rotated_and_stored(randn):
    heads, (cos, sin) = randn(3, 5 + 2 * 3, 24), rotation(3, 8)
    caches = randn(4, 4, 3, 24), randn(4, 4, 3, 24)
    want_caches = [cache.clone() for cache in caches]
    slots = torch.tensor([9, 0, 15], device=DEVICE)
    assert kv_gpu.can_rotate_and_write(heads, cos, sin, *caches)
    query = rotate_and_write_kv(heads, cos, sin, *caches, slots)
    close(query, kv_reference.rotate_and_write_kv(heads, cos, sin, *want_caches, slots))
    for got, want in zip(caches, want_caches, strict=True):
        close(got, want)


@pytest.mark.parametrize("dims", [(16, 16), (24, 8)])
def test_keys_and_values_are_stored(randn, dims):
    key, value = randn(3, 5, dims[0])[:, 1:4], randn(3, 3, dims[1])
    caches = randn(4, 4, 3, dims[0]), randn(4, 4, 3, dims[1])
    want = [cache.clone() for cache in caches]
    slots = torch.tensor([9, 3, 15], device=DEVICE)
    assert kv_gpu.can_write(key, value, caches[0])
    write_kv(key, value, *caches, slots)
    kv_reference.write_kv(key, value, *want, slots)
    assert all(torch.equal(*pair) for pair in zip(caches, want, strict=True))


@pytest.mark.parametrize("moves", [[(3, 4), (4, 5), (5, 3), (9, 1), (0, 0), (0, 0), (7, 7)], [(15, 2)]])
def test_slots_move_as_if_all_were_read_first(randn, moves):
    caches = [(randn(4, 4, 3, 24), randn(4, 4, 3, 8)) for _ in range(2)]
    want = [tuple(cache.clone() for cache in pair) for pair in caches]
    source, destination = torch.tensor(moves, device=DEVICE).unbind(1)
    assert kv_gpu.can_move(caches, len(moves))
    move_slots(caches, source, destination)
    for got, old in zip(caches, want, strict=True):
        for moved, before in zip(got, old, strict=True):
            expected = before.clone().flatten(0, 1)
            for here, there in moves:
                expected[there] = before.flatten(0, 1)[here]
            assert torch.equal(moved.flatten(0, 1), expected)
    kv_reference.move_slots(want, source, destination)
    assert all(
        torch.equal(a, b) for pair in zip(caches, want, strict=True) for a, b in zip(*pair, strict=True)
    )


def test_nothing_and_very_much_is_moved(randn):
    caches = [(randn(700, 4, 1, 16), randn(700, 4, 1, 16))]
    want = [tuple(cache.clone() for cache in caches[0])]
    none = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    move_slots(caches, none, none)
    order = torch.randperm(2800, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    assert not kv_gpu.can_move(caches, len(order))
    move_slots(caches, order, order.flip(0))
    kv_reference.move_slots(want, order, order.flip(0))
    assert torch.equal(caches[0][0], want[0][0])
