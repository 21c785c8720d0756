"""An image as the model sees it, and the tokens that stand for it."""

from __future__ import annotations

import hashlib

import attrs
import numpy as np
import torch

from specdecode.kv import ContentMark


@attrs.frozen(eq=False, kw_only=True)
class ProcessedImage:
    """What transformers' image processor made of an image: tiles, the last of them the whole picture."""

    pixels: torch.Tensor = attrs.field(repr=False)  #: ``[tiles, 3, height, width]`` in the target's dtype
    mask: torch.Tensor = attrs.field(repr=False)  #: ``[tiles, height, width]`` bool: what is no padding
    rows: int  #: tiles of the picture cut up; 0: it is not
    columns: int
    key: bytes = attrs.field(init=False)  #: hash of all the above

    def __attrs_post_init__(self) -> None:
        digest = hashlib.blake2b(repr((self.pixels.shape, self.rows, self.columns)).encode(), digest_size=16)
        for tensor in (self.pixels, self.mask):
            digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
        object.__setattr__(self, "key", digest.digest())


@attrs.frozen(eq=False)
class PromptImage:
    """An image in a prompt."""

    image: ProcessedImage
    #: ``[P]`` int64, ascending: the prompt's tokens that its vectors take the place of
    positions: np.ndarray = attrs.field(repr=False)

    @property
    def mark(self) -> ContentMark:
        """What the ids of these tokens do not tell of their content."""
        return ContentMark(int(self.positions[0]), int(self.positions[-1]) + 1, self.image.key)
