"""Launches that Triton need not be asked about: what they are told apart by, against what Triton does.

In a process of its own: here Triton was imported for its interpreter, which knows no such thing.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from specdec_kernels.gpu import launching

pytest.importorskip("triton")

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.float8_e4m3fn]
LARGE = [1 << 31, (1 << 31) - 1, -(1 << 31), -(1 << 31) - 16, 1 << 40, (1 << 63) - 1, 1 << 63]
#: A pair is a tensor of a dtype that begins so many elements into its memory.
ARGUMENTS = st.one_of(
    st.none(),
    st.integers(-3, 70),
    st.sampled_from(LARGE),
    st.floats(allow_nan=False),
    st.tuples(st.sampled_from(DTYPES), st.integers(0, 20)),
)


def argument(value):
    return torch.zeros(64, dtype=value[0])[value[1] :] if isinstance(value, tuple) else value


def told_by_triton(value, *, specialized=True):
    from triton.backends.compiler import BaseBackend
    from triton.runtime import jit

    return jit.native_specialize_impl(BaseBackend, argument(value), False, specialized, specialized)


@given(ARGUMENTS, ARGUMENTS)
def check(one, other):
    same = launching.specialization([argument(one)]) == launching.specialization([argument(other)])
    assert not same or told_by_triton(one) == told_by_triton(other)
    assert not same or told_by_triton(one, specialized=False) == told_by_triton(other, specialized=False)


def test_what_is_the_same_here_is_the_same_to_triton():
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "checked\n"


def test_what_kernels_are_compiled_for_is_told_apart():
    tensors = (torch.float32, 0), (torch.float32, 1), (torch.int64, 0)
    told = [
        launching.specialization([argument(value)])
        for value in (None, 0.5, 1, 2, 16, 1 << 40, 1 << 63, *tensors)
    ]
    assert all(one != other for place, one in enumerate(told) for other in told[:place])


def test_what_is_not_known_is_left_to_triton():
    assert launching.specialization([1, object()]) is None
    assert launching.specialization([True]) is None


if __name__ == "__main__":
    check()
    print("checked")
