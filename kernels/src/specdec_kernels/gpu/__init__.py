"""Kernels for a GPU: Triton beside each operation's torch reference, in its ``gpu.py``."""

from .launching import DTYPES, interpreted, launch, takes

__all__ = ["DTYPES", "interpreted", "launch", "takes"]
