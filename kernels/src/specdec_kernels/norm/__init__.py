"""RMS normalisation (Zhang and Sennrich, arXiv 1910.07467)."""

from .reference import fused_add_rms_norm, rms_norm

__all__ = ["fused_add_rms_norm", "rms_norm"]
