"""Images' vectors, where a step computes tokens that stand for them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from ..distributed import SOLO, Group
from ..engine.plan import StepPlan
from ..layers import GivenEmbeddings
from ..models import PromptImage, VisionTower

#: Bytes of vectors that are kept.
KEPT_BYTES = 128 << 20


class EncodedImages:
    """Vectors by image, the last ones used kept; what was dropped is computed again, to the same bits.

    Args:
        group: ranks that compute the same images in the same order; rank 0's vectors are everybody's.
    """

    def __init__(self, tower: VisionTower, kept_bytes: int = KEPT_BYTES, group: Group = SOLO) -> None:
        self.tower = tower
        self._group = group
        self.encoded = 0  #: how often the tower ran
        self._most = kept_bytes
        self._kept: OrderedDict[bytes, torch.Tensor] = OrderedDict()

    def reserve(self) -> int:
        """Bytes to keep for it on a GPU: what the largest run takes, which is run here, and kept vectors."""
        device = self.tower.device
        if device.type != "cuda":
            return 0
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        self.tower.run_largest()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before + self._most

    def vectors(self, image: PromptImage) -> torch.Tensor:
        """``[P, H]``, one for each of the image's positions."""
        key = image.image.key
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        vectors = self.tower.encode(image.image)
        self._group.broadcast(vectors)
        assert len(vectors) == len(image.positions), f"{len(vectors)} vectors, {len(image.positions)} tokens"
        self.encoded += 1
        self._kept[key] = vectors
        while sum(kept.nbytes for kept in self._kept.values()) > self._most and len(self._kept) > 1:
            self._kept.popitem(last=False)
        return vectors

    def of_plan(self, plan: StepPlan, offsets: Sequence[int]) -> GivenEmbeddings | None:
        """What takes the place of the table's rows in a step; ``offsets``: where each row's tokens begin."""
        return self._given(
            (image, row.start, row.start + row.new, offset - row.start)
            for row, offset in zip(plan.rows, offsets, strict=True)
            for image in row.request.images
        )

    def of_prompt(self, images: Sequence[PromptImage]) -> GivenEmbeddings | None:
        """The same for a whole prompt, in a forward of its own."""
        return self._given((image, 0, int(image.positions[-1]) + 1, 0) for image in images)

    def _given(self, wanted: Iterable[tuple[PromptImage, int, int, int]]) -> GivenEmbeddings | None:
        """Of ``(image, first position, last + 1, place of position 0)``."""
        tokens: list[np.ndarray] = []
        vectors: list[torch.Tensor] = []
        for image, start, stop, shift in wanted:
            first, last = np.searchsorted(image.positions, (start, stop))
            if first < last:
                tokens.append(image.positions[first:last] + shift)
                vectors.append(self.vectors(image)[first:last])
        if not tokens:
            return None
        return GivenEmbeddings(
            torch.from_numpy(np.concatenate(tokens)).to(self.tower.device), torch.cat(vectors)
        )
