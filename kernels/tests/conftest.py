"""The kernels of a forward pass are tested as C++, as Triton and as their torch references.

Without a GPU, Triton's kernels run under its interpreter. It must be asked for before Triton and the
kernels are imported, which is done here; after that it is on in the tests of Triton kernels alone
(``test_gpu_*.py`` and the ``triton`` implementation of others), so that no other test of the process gets
slow kernels.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pkgutil

import pytest
import specdec_kernels
import torch
from specdec_kernels.gpu import launching
from specdec_kernels.native import loading

_ON_A_CARD = torch.cuda.is_available()
_HAS_TRITON = importlib.util.find_spec("triton") is not None


def _import_for_the_interpreter() -> None:
    asked = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        for package in pkgutil.iter_modules(specdec_kernels.__path__, "specdec_kernels."):
            if importlib.util.find_spec(f"{package.name}.gpu") is not None:
                importlib.import_module(f"{package.name}.gpu")
    finally:
        if asked is None:
            del os.environ["TRITON_INTERPRET"]
        launching.interpreted.cache_clear()  # a module may have asked while it was imported


def _prepare_the_interpreter_once_a_launch() -> None:
    """Have it put its operations into Triton's language once for each module whose functions a launch calls.

    It does so anew at every call of such a function, to the same effect, and that took a third of the time.
    """
    from triton.runtime import interpreter

    prepare, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    prepared: set[int] = set()

    def once(function):
        module = id(function.__globals__)
        if module not in prepared:
            prepared.add(module)
            return prepare(function)
        return None

    def launched(*args, **named):
        prepared.clear()
        launch(*args, **named)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = once, launched


if _HAS_TRITON and not _ON_A_CARD:
    _import_for_the_interpreter()
    _prepare_the_interpreter_once_a_launch()


@pytest.fixture
def interpreter():
    """Triton's kernels take CPU tensors; on a card nothing changes."""
    with pytest.MonkeyPatch.context() as patch:
        if not _ON_A_CARD:
            patch.setenv("TRITON_INTERPRET", "1")
        launching.interpreted.cache_clear()
        yield
    launching.interpreted.cache_clear()


@pytest.fixture(autouse=True)
def _interpreter_for_kernels_of_a_gpu(request):
    if request.path.name.startswith("test_gpu_"):
        request.getfixturevalue("interpreter")


@pytest.fixture(params=["native", "torch", "triton"])
def implementation(request, monkeypatch):
    """Which of the three a test runs on; skipped where it cannot be had."""
    if request.param == "native":
        if loading.library() is None:
            pytest.skip("the C++ kernels could not be compiled here")
        return request.param
    monkeypatch.setattr(loading, "library", lambda: None)
    if request.param == "triton":
        if not _HAS_TRITON:
            pytest.skip("there is no Triton")
        if _ON_A_CARD:
            pytest.skip("the interpreter is for machines without a GPU; test_gpu_*.py run on one")
        request.getfixturevalue("interpreter")
    return request.param
