"""The dense forward that references are made of; the engine re-scores by the same one."""

from ..runner.dense import DenseRow, dense_forward

__all__ = ["DenseRow", "dense_forward"]
