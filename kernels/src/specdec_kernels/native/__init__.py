"""Kernels for a CPU: C++ beside each operation's torch reference, compiled on the machine they run on."""

from .loading import DTYPES, has_int8, library, takes

__all__ = ["DTYPES", "has_int8", "library", "takes"]
