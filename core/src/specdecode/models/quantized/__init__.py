"""Quantised checkpoints: the layouts that people publish, read into one form that stays quantised."""

from .form import form_of
from .loading import QuantizedLoader, randomize_quantized
from .scheme import Layout, Scheme, read_scheme, scheme_of

__all__ = [
    "Layout",
    "QuantizedLoader",
    "Scheme",
    "form_of",
    "randomize_quantized",
    "read_scheme",
    "scheme_of",
]
