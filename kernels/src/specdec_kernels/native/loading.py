"""The C++ kernels as one shared library, compiled by the machine's own compiler at first use.

Like ``torch.compile``, it needs a C++ compiler (``$CXX``, else g++, c++ or clang++); without one, or
with ``SPECDEC_NATIVE=0``, the torch references do the work. The result is kept in
``$SPECDEC_KERNELS_CACHE``, by default ``specdec-kernels`` in the user's cache folder, under a name
that tells the sources, the flags, the compiler and the processor.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

_PACKAGE = Path(__file__).parent.parent
_FLAGS = ("-std=c++17", "-O3", "-shared", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi")
#: Codes of the dtypes in the C++ functions.
DTYPES = {torch.float32: 0, torch.bfloat16: 1}

_P, _I, _N, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_SIGNATURES: dict[str, tuple[type, ...]] = {
    "specdec_rms_norm": (_N, _P, _P, _P, _I, _I, _I, _I, _F),
    "specdec_add_rms_norm": (_N, _P, _P, _P, _P, _P, _I, _I, _F),
    "specdec_noise_words": (*[_P] * 6, _I, _I, _I, _N),
    "specdec_silu_and_mul": (_N, _P, _P, _I, _I, _N),
    "specdec_gelu_tanh_and_mul": (_N, _P, _P, _I, _I, _N),
    "specdec_rotate": (_N, _P, _P, _P, _P, _I, _I, _I, _I, _I),
    "specdec_write_kv": (_P, _P, _P, _P, _P, _I, _I, _I, _I, _I),
    "specdec_write_kv8": (_N, _P, _P, _P, _P, _P, _I, _I, _I, _I, _I),
    "specdec_rotate_and_write": (_N, _P, _P, _P, _P, _P, _P, _P, _I, _I, _I, _I, _I),
    "specdec_paged_attention": (_N, _N, *[_P] * 8, *[_I] * 11, _F, _N),
    "specdec_dense_linear": (_N, _P, _P, _P, _P, _I, _I, _I, _N),
    "specdec_grouped_linear": (_N, _P, _P, _P, _P, _I, _I, _I, _N),
    "specdec_combine_experts": (_N, _P, _P, _P, _P, _I, _I, _I, _N),
    "specdec_quantized_linear": (_N, _N, _N, _N, *[_P] * 6, *[_I] * 5, _N),
    "specdec_int8_linear": (_N, _P, _P, _P, _P, _P, _I, _I, _I, _I, _N),
}


@functools.cache
def library() -> ctypes.CDLL | None:
    """The kernels, compiled if need be; None if they cannot be had, of which a warning tells once."""
    if os.environ.get("SPECDEC_NATIVE") == "0":
        return None
    compiler = _compiler()
    if compiler is None:
        logger.warning(
            "no C++ compiler was found, so a CPU works with torch's own operations, which are slower: "
            "install g++ or clang++, or name one in CXX"
        )
        return None
    try:
        loaded = ctypes.CDLL(str(_built(compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        logger.warning("the CPU kernels could not be compiled, torch's own operations are used: %s", detail)
        return None
    for name, arguments in _SIGNATURES.items():
        if name == "specdec_int8_linear" and not loaded.specdec_has_int8():
            continue
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, None
    return loaded


@functools.cache
def has_int8() -> bool:
    """Whether the library has products of bytes: the processor has VNNI."""
    kernels = library()
    return kernels is not None and bool(kernels.specdec_has_int8())


def takes(tensor: torch.Tensor) -> bool:
    """Whether the kernels can work on ``tensor``: on a CPU, in float32 or bfloat16."""
    return tensor.is_cpu and tensor.dtype in DTYPES and library() is not None


def _compiler() -> str | None:
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "c++", "clang++"]
    return next((found for name in names if (found := shutil.which(name))), None)


def _built(compiler: str) -> Path:
    sources = sorted(_PACKAGE.glob("*/*.cpp"))
    # torch's own OpenMP, so that both share one pool of threads
    openmp = _loaded_openmp()
    march = "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"
    flags = [*_FLAGS, march, *(("-fopenmp",) if openmp else ())]
    told = hashlib.sha256()
    for source in [*sources, *sorted(_PACKAGE.glob("*/*.h"))]:
        told.update(source.read_bytes())
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    for part in (*flags, str(openmp), version, _processor()):
        told.update(part.encode())
    folder = _cache_folder()
    target = folder / f"kernels-{told.hexdigest()[:20]}.so"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / "kernels.so"
            link = [str(openmp)] if openmp else []
            command = [compiler, *flags, *map(str, sources), "-o", str(made), *link]
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
            os.replace(made, target)  # whole or not at all: processes may compile side by side
    return target


def _cache_folder() -> Path:
    chosen = os.environ.get("SPECDEC_KERNELS_CACHE")
    if chosen:
        return Path(chosen)
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "specdec-kernels"


def _loaded_openmp() -> Path | None:
    """The OpenMP runtime that torch brought into this process; None where that cannot be seen."""
    if sys.platform != "linux":
        return None
    maps = Path("/proc/self/maps").read_text()
    found = re.search(r"(/\S*/libgomp[^/\s]*\.so[^/\s]*)", maps)
    return Path(found[1]) if found else None


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() + platform.machine()
    wanted = ("model name", "flags", "Features")
    return "".join(line for line in text.split("\n\n")[0].splitlines(True) if line.startswith(wanted))
