"""Images of a prompt at the door: checked, processed, and their placeholders written out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from ..contract import ConfigError

if TYPE_CHECKING:
    from ..models import ImagePreprocessor, ProcessedImage, PromptImage

#: Why a model without a vision tower takes no images, and what to do.
TEXT_ONLY = (
    "this model takes text only; use one with a vision tower, such as SmolVLM, without "
    "limit_mm_per_prompt={'image': 0}"
)


@attrs.frozen(eq=False)
class ImageDoor:
    """Puts images into prompts of a model that takes them."""

    preprocessor: ImagePreprocessor
    most: int | None  #: of a prompt

    def take(
        self, ids: Sequence[int], data: Any, where: str
    ) -> tuple[tuple[int, ...], tuple[PromptImage, ...]]:
        """The tokens of a prompt, placeholders written out, and its images.

        Args:
            ids: with one placeholder for each image.
            data: ``multi_modal_data``.

        Raises:
            ConfigError: another modality, too many images, not as many as placeholders, or one that cannot
                be processed.
        """
        name = f"{where}.multi_modal_data"
        images = _images(data, name)
        if self.most is not None and len(images) > self.most:
            raise ConfigError(
                f"{name} has {len(images)} images, and limit_mm_per_prompt allows {self.most}: raise that, "
                "or give fewer"
            )
        placeholders = self.preprocessor.count(ids)
        if placeholders != len(images):
            raise ConfigError(
                f"{name} has {len(images)} images, and the prompt {placeholders} placeholders "
                f"{self.preprocessor.image_token!r}: write one for each image, where it belongs"
            )
        done = [
            self.preprocessor.process(image, f"{name}['image'][{index}]")
            for index, image in enumerate(images)
        ]
        return self._written_out(ids, done)

    def _written_out(
        self, ids: Sequence[int], images: Sequence[ProcessedImage]
    ) -> tuple[tuple[int, ...], tuple[PromptImage, ...]]:
        from ..models import PromptImage

        placeholder, coming = self.preprocessor.image_token_id, iter(images)
        whole: list[int] = []
        found: list[PromptImage] = []
        for token in ids:
            if token != placeholder:
                whole.append(token)
                continue
            image = next(coming)
            tokens = self.preprocessor.tokens(image)
            found.append(
                PromptImage(image, len(whole) + np.flatnonzero(np.asarray(tokens, np.int64) == placeholder))
            )
            whole += tokens
        return tuple(whole), tuple(found)


def refuse_images(data: Any, where: str) -> None:
    """Refuse ``multi_modal_data`` of a prompt, if there is any, where the model takes text only.

    Raises:
        ConfigError: there is.
    """
    if not isinstance(data, Mapping) or any(value is not None for value in data.values()):
        raise ConfigError(f"{where}.multi_modal_data is refused: {TEXT_ONLY}")


def _images(data: Any, name: str) -> list[Any]:
    """The images of ``multi_modal_data``; ConfigError for anything else in it."""
    if not isinstance(data, Mapping):
        raise ConfigError(f"{name} must be a mapping such as {{'image': image}}, got {_shown(data)}")
    for modality, value in data.items():
        if modality != "image" and value is not None:
            raise ConfigError(f"{name}[{modality!r}] is refused: images are the one modality that is built")
    given = data.get("image")
    if given is None:
        return []
    images = list(given) if isinstance(given, list | tuple) else [given]
    for index, image in enumerate(images):
        if not is_image(image):
            raise ConfigError(
                f"{name}['image'][{index}] must be a PIL.Image.Image, got {_shown(image)}: open it with "
                "PIL.Image.open or PIL.Image.fromarray"
            )
    return images


def is_image(value: Any) -> bool:
    """Whether it is a ``PIL.Image.Image``; False without Pillow."""
    try:
        from PIL import Image
    except ImportError:
        return False
    return isinstance(value, Image.Image)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
