"""Weights that stay quantised: as they are published, and as the kernels of a GPU read them."""

from .codes import MIDDLE, Kind, QuantizedMatrix
from .words import BLOCK, WordMatrix, why_no_words, words_of

__all__ = ["BLOCK", "MIDDLE", "Kind", "QuantizedMatrix", "WordMatrix", "why_no_words", "words_of"]
