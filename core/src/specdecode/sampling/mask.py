"""A set of tokens of one vocabulary, a bit each. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import numpy as np


@attrs.frozen(eq=False)
class TokenMask:
    """The tokens that may be drawn: token ``t`` is bit ``t % 8`` of byte ``t // 8``."""

    bits: np.ndarray  #: ``[ceil(vocab / 8)]`` uint8, not to be written; bits behind the vocabulary are 0

    @classmethod
    def of(cls, bits: bytes, vocab_size: int) -> TokenMask:
        """From at least ``vocab_size`` bits, of which those behind the vocabulary are dropped."""
        width = -(-vocab_size // 8)
        if len(bits) < width:
            raise ValueError(f"a vocabulary of {vocab_size} wants {width} bytes, got {len(bits)}")
        kept = np.frombuffer(bits, dtype=np.uint8, count=width)
        if spare := width * 8 - vocab_size:
            kept = kept.copy()
            kept[-1] &= 0xFF >> spare
        return cls(kept)

    @classmethod
    def none(cls, vocab_size: int) -> TokenMask:
        """No token at all."""
        return cls(np.zeros(-(-vocab_size // 8), dtype=np.uint8))

    def __contains__(self, token: int) -> bool:
        return bool(self.bits[token >> 3] >> (token & 7) & 1)

    def __bool__(self) -> bool:
        return bool(self.bits.any())

    def without(self, tokens: Iterable[int]) -> TokenMask:
        """Those that are not among ``tokens``."""
        bits = self.bits.copy()
        for token in tokens:
            bits[token >> 3] &= ~(1 << (token & 7)) & 0xFF
        return TokenMask(bits)

    def to_array(self, vocab_size: int) -> np.ndarray:
        """``[vocab_size]`` bool."""
        return np.unpackbits(self.bits, count=vocab_size, bitorder="little").view(bool)
