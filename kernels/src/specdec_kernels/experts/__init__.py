"""Mixture of experts: each token's few MLPs of many, chosen by a router (Shazeer et al., arXiv 1701.06538).

Rows are grouped by expert, so that the weights of an expert that any token of the step chose are read once,
and those of the others not at all. A token's result is the same, to the bit, whatever tokens stand beside
it: a product sums over its inputs in their order, and a token's experts are added up from the likeliest on.
"""

from __future__ import annotations

import torch

from ..gpu import takes
from ..projection import Activation, Stream
from . import native, reference
from .groups import Groups, PackedExperts, group, pack_experts


def choose(logits: torch.Tensor, count: int, *, normalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``count`` likeliest experts of each token, the likeliest first; of equal ones the first.

    Args:
        logits: ``[T, E]`` float32.
        normalize: weights add up to 1; else they are shares of all experts.

    Returns:
        ``[T, count]`` int64, and their weights, float32.
    """
    return reference.choose(logits, count, normalize=normalize)


def grouped_linear(x: torch.Tensor, weight: torch.Tensor | PackedExperts, groups: Groups) -> torch.Tensor:
    """Each row times the weights of its expert, on a CPU.

    Args:
        x: ``[P, in]``, in the order of ``groups``.
        weight: ``[E, out, in]``, or packed.

    Returns:
        ``[P, out]`` of the dtype of ``x``; packed, a row's bits do not depend on the rows beside it.
    """
    if isinstance(weight, PackedExperts):
        chosen = native if native.can_multiply(x, weight) else reference
        return chosen.packed_grouped_linear(x, weight, groups)
    return reference.grouped_linear(x, weight, groups)


def combine(y: torch.Tensor, groups: Groups, weights: torch.Tensor) -> torch.Tensor:
    """A token's sum of what its experts gave, by weight, on a CPU: ``[P, H]`` to ``[T, H]``.

    Args:
        y: in the order of ``groups``.
        weights: ``[T, k]`` float32.
    """
    return (native if native.can_combine(y) else reference).combine(y, groups, weights)


def mix(
    x: torch.Tensor,
    logits: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    count: int,
    normalize: bool,
    activation: Activation,
) -> torch.Tensor:
    """The weighted sum of each token's experts: ``[T, H] -> [T, H]``.

    Args:
        logits: ``[T, E]`` float32, of the router.
        gate_up: ``[E, 2 I, H]``, rows of the gate, then of the other half; contiguous.
        down: ``[E, H, I]``, contiguous.
        count, normalize: as of :func:`choose`.
        activation: ``silu``, or ``gelu_tanh``.
    """
    return _implementation(x, gate_up, down).mix(
        x, logits, gate_up, down, count=count, normalize=normalize, activation=activation
    )


def add_experts(
    stream: Stream,
    router: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gain: torch.Tensor,
    *,
    eps: float,
    count: int,
    normalize: bool,
    activation: Activation,
) -> Stream:
    """The stream with its mixture of experts added, scaled by the gain of the norm that comes next.

    The router's logits and weights are float32. Looks at no value on the host.

    Args:
        router: ``[E, H]``, contiguous.
        gate_up, down, count, normalize, activation: as of :func:`mix`.
        gain: ``[H]``.
        eps: of the norm in front.
    """
    return _implementation(stream.scaled, router, gate_up, down).add_experts(
        stream, router, gate_up, down, gain, eps=eps, count=count, normalize=normalize, activation=activation
    )


def expert_sums(
    stream: Stream,
    router: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    eps: float,
    count: int,
    normalize: bool,
    activation: Activation,
) -> torch.Tensor:
    """What :func:`add_experts` adds, ``[T, H]``, rounded; of ranks that share out ``I``, one term."""
    return _implementation(stream.scaled, router, gate_up, down).expert_sums(
        stream, router, gate_up, down, eps=eps, count=count, normalize=normalize, activation=activation
    )


def expected_experts(num_experts: int, count: int, tokens: float) -> float:
    """How many experts ``tokens`` tokens touch on the average, each choosing ``count`` evenly at random.

    ``E (1 - (1 - k / E)^n)``. Tokens of one text choose alike, so that a step of a real one touches fewer.
    """
    return num_experts * (1 - (1 - count / num_experts) ** tokens)


def _implementation(*tensors: torch.Tensor):
    if takes(*tensors):
        from . import gpu  # needs Triton

        return gpu
    return reference


__all__ = [
    "Groups", "PackedExperts", "add_experts", "choose", "combine", "expected_experts", "expert_sums", "group",
    "grouped_linear", "mix", "pack_experts",
]  # fmt: skip
