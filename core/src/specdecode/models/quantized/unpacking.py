"""What the layouts share: integers out of words of 32 bits, and scales in rows."""

from __future__ import annotations

import torch
from specdec_kernels.quantized import Kind


def unpack(words: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """``[n, m]`` int32 to ``[n, m * 32 / bits]`` uint8, the lowest bits first.

    Args:
        order: which of a word's numbers its bits hold, from the lowest on; None: one after the other.
    """
    count = 32 // bits
    codes = words.new_empty((*words.shape, count), dtype=torch.uint8)
    for place in range(count):
        taken = words >> (bits * place) & ((1 << bits) - 1)
        codes[..., place if order is None else order[place]] = taken.to(torch.uint8)
    return codes.flatten(-2)


def kind_of(bits: int) -> Kind:
    return "int4" if bits == 4 else "int8"


def expect(name: str, tensor: torch.Tensor, *shapes: tuple[int, ...]) -> torch.Tensor:
    """``tensor``, whose shape is one of these; ValueError if it is not."""
    if tuple(tensor.shape) not in shapes:
        wanted = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
        raise ValueError(f"{name} must be {wanted}, got {list(tensor.shape)}")
    return tensor


def sorted_by_group(
    codes: torch.Tensor, groups: torch.Tensor | None, count: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Columns by their group, and the order they are then in; None where they stood so.

    Args:
        codes: ``[out, in]``.
        groups: ``[in]``, of each input (``g_idx``).
        count: of groups.
    """
    if groups is None or groups.numel() == 0:
        return codes, None
    inputs = codes.shape[1]
    groups = expect("g_idx", groups, (inputs,)).long()
    plain = torch.arange(inputs, device=groups.device) // (inputs // count)
    if torch.equal(groups, plain):
        return codes, None
    ordered, order = groups.sort(stable=True)
    if not torch.equal(ordered, plain):
        raise ValueError("g_idx has groups of different sizes")
    return codes.index_select(1, order), order
