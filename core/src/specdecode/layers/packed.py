"""Weights in the form in which their products with a few rows are fastest on a CPU.

Packing happens once, after a model is loaded; a packed layer takes no more weights. The forms of the
C++ kernels have *invariant* rows: the bits of a row do not depend on how many rows stand beside it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeAlias

import torch
from specdec_kernels.linear import pack, pack_int8, packed_linear
from specdec_kernels.native import DTYPES, has_int8, library

#: Rows that oneDNN lays weights out for.
_ROWS_HINT = 8


class PackedWeight(Protocol):
    """``x [T, in] -> [T, out]``."""

    num_bytes: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


Form: TypeAlias = Callable[[torch.Tensor, torch.Tensor | None], PackedWeight]


class Packable(torch.nn.Module):
    """A layer whose weight may be replaced by a packed form of it."""

    weight: torch.nn.Parameter
    _packed: Any = None
    _form: Form | None = None
    _dense_shape: tuple[int, ...] = ()

    @property
    def packed(self) -> bool:
        """Whether it computes by another form of its weight."""
        return self._packed is not None

    @property
    def refillable(self) -> bool:
        """Whether :meth:`refilled` can be: not for what was never dense, as weights that stay quantised."""
        return self._packed is None or self._form is not None

    def pack(self, form: Form) -> None:
        """Replace the weight by a packed form of it; nothing can be loaded but in :meth:`refilled`."""
        self._form, self._dense_shape = form, tuple(self.weight.shape)
        self.hold(self._make_packed(form))

    def hold(self, packed: Any) -> None:
        """Replace the weight by another form of it."""
        self._packed = packed
        self._set_weight(0)

    @contextlib.contextmanager
    def refilled(self) -> Iterator[None]:
        """Within, all of the weight is to be loaded anew, whatever its form; behind, it has that form again.

        A weight that is not packed stays where it is.
        """
        form = self._form
        if form is None:
            yield
            return
        self._set_weight(*self._dense_shape)
        try:
            yield
            self.pack(form)
        finally:
            self._set_weight(0)

    def take_packed(self, other: Packable) -> None:
        """Compute with the packed weight of ``other``, an equal layer; nothing if that is not packed."""
        self._packed, self._form, self._dense_shape = other._packed, other._form, other._dense_shape

    def _make_packed(self, form: Form) -> Any:
        raise NotImplementedError

    def _set_weight(self, *shape: int) -> None:
        self.weight = torch.nn.Parameter(self.weight.new_zeros(shape), requires_grad=False)


def dense_form(dtype: torch.dtype, *, exact: bool) -> Form | None:
    """The form of weights in ``dtype`` on this machine's processor; None: leave them as they are.

    The C++ kernels read small batches at the memory's rate and do prompts as fast as oneDNN, but for
    processors with matrix units (AMX), which oneDNN uses: there ``exact`` decides.
    """
    slower = not exact and dtype is torch.bfloat16 and _has_matrix_units()
    if dtype in DTYPES and library() is not None and not slower:
        return NativeWeight
    return OneDnnWeight if onednn_available(dtype) else None


def _has_matrix_units() -> bool:
    asked = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return bool(asked and asked())


def onednn_available(dtype: torch.dtype) -> bool:
    """Whether this build and processor have oneDNN's packed product for ``dtype``."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is torch.float32


class OneDnnWeight:
    """A weight in oneDNN's blocked layout. Its rows are not invariant on every processor."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.num_bytes = weight.numel() * weight.element_size()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS_HINT)
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")


class NativeWeight:
    """A weight in the layout of the C++ kernels, which read at the memory's rate."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._matrix = pack(weight)
        self._bias = None if bias is None else bias.float()
        self.num_bytes = self._matrix.num_bytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return packed_linear(x, self._matrix, self._bias)


class Int8Weight:
    """Int8, symmetric, with a scale for each output.

    Where the processor multiplies bytes (VNNI), activations are quantised too as they come, per token
    and group of inputs; elsewhere they stay bfloat16.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._bias = None if bias is None else bias.float()
        self._matrix = pack_int8(weight) if has_int8() else None
        if self._matrix is not None:
            self.num_bytes = self._matrix.num_bytes
            return
        scale = weight.float().abs().amax(1).clamp_(min=torch.finfo(torch.float32).tiny) / 127
        self._weight = (weight.float() / scale[:, None]).round_().to(torch.int8)
        self._scale = scale.to(torch.bfloat16)
        self.num_bytes = self._weight.nbytes + self._scale.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._matrix is not None:
            return packed_linear(x, self._matrix, self._bias)
        y = torch._weight_int8pack_mm(x.contiguous(), self._weight, self._scale)
        return y if self._bias is None else (y + self._bias).to(y.dtype)
