"""Counter-based noise: the same value for the same key, on any device, in any order."""

from .reference import GUMBEL_MAX, GUMBEL_MIN, gumbel, philox4x32, uniform

__all__ = ["GUMBEL_MAX", "GUMBEL_MIN", "gumbel", "philox4x32", "uniform"]
