"""Kernels of specdec: one folder an operation."""
