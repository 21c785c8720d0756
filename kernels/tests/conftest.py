"""The kernels of a forward pass are tested twice: the C++ ones and their torch references."""

from __future__ import annotations

import pytest
from specdec_kernels.native import loading


@pytest.fixture(params=["native", "torch"])
def implementation(request, monkeypatch):
    """Which of the two a test runs on; skipped where the C++ kernels cannot be had."""
    if request.param == "torch":
        monkeypatch.setattr(loading, "library", lambda: None)
    elif loading.library() is None:
        pytest.skip("the C++ kernels could not be compiled here")
    return request.param
