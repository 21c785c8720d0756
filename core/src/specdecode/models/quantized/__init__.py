"""Quantised checkpoints: the layouts that people publish, read into one form that stays quantised."""

from .form import form_of
from .gguf import gguf_parts
from .loading import QuantizedLoader, randomize_quantized, stored_parts
from .scheme import Layout, Scheme, quantization_to_make, read_scheme, scheme_of

__all__ = [
    "Layout", "QuantizedLoader", "Scheme", "form_of", "gguf_parts", "quantization_to_make",
    "randomize_quantized", "read_scheme", "scheme_of", "stored_parts",
]  # fmt: skip
