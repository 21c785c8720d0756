"""From an image to pixels and placeholder tokens, as transformers' processors of these families make them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from specdecode.contract import ConfigError

from .image import ProcessedImage

if TYPE_CHECKING:
    from ..files import ModelFiles

#: What to do without images.
WITHOUT = "set limit_mm_per_prompt={'image': 0} to take text only"

#: Tokens around placeholders.
_FENCE, _GLOBAL = "<fake_token_around_image>", "<global-img>"


class ImagePreprocessor:
    """Cuts images into tiles and writes the tokens that stand for them.

    The tiles are made by the checkpoint's image processor, a class of transformers; with torchvision it
    resizes otherwise than with Pillow alone, by some bits. The tokens are those of ``Idefics3Processor`` and
    ``SmolVLMProcessor`` there, which themselves want packages for videos.
    """

    def __init__(self, files: ModelFiles, tokenizer: Any, dtype: torch.dtype) -> None:
        """Read the checkpoint's processor.

        Raises:
            ConfigError: Pillow is not installed, or the checkpoint has no image processor that can be read.
        """
        assert files.vision is not None
        config = files.vision.hf_config
        self._patch = config.vision_config.patch_size
        self._scale = config.scale_factor
        self._tokenizer = tokenizer
        self._dtype = dtype
        self.image_token_id = files.vision.image_token_id
        self.image_token: str = tokenizer.convert_ids_to_tokens(self.image_token_id)
        self._processor = _read_processor(files)

    def process(self, image: Any, where: str) -> ProcessedImage:
        """Tiles of a ``PIL.Image.Image``.

        Raises:
            ConfigError: the processor raised, or gave tiles that the tower cannot take.
        """
        try:
            made = self._processor(images=[[image]], return_tensors="pt", return_row_col_info=True)
        except Exception as error:  # transformers documents no set of errors for what an image may be
            raise ConfigError(f"{where} cannot be processed ({type(error).__name__}: {error})") from error
        pixels = made["pixel_values"][0].to(self._dtype)
        mask = made.get("pixel_attention_mask")
        mask = pixels.new_ones(pixels[:, 0].shape, dtype=torch.bool) if mask is None else mask[0].bool()
        if pixels.shape[2] != pixels.shape[3] or pixels.shape[2] % (self._patch * self._scale):
            raise ConfigError(
                f"{where} became tiles of {pixels.shape[3]} x {pixels.shape[2]} pixels, and the vision tower "
                f"takes squares of a multiple of {self._patch * self._scale}: see whether "
                "preprocessor_config.json is the model's own"
            )
        if not pixels.flatten(1).any(1).all():
            raise ConfigError(
                f"{where} has a tile whose pixels are all 0 when they are normalised, which the vision tower "
                "takes for padding: use another image"
            )
        return ProcessedImage(pixels=pixels, mask=mask, rows=made["rows"][0][0], columns=made["cols"][0][0])

    def tokens(self, image: ProcessedImage) -> list[int]:
        """The ids that stand for an image; of them :attr:`image_token_id` one for each of its vectors."""
        side = image.pixels.shape[2] // self._patch // self._scale
        vectors = self.image_token * side * side
        text = ""
        for row in range(image.rows):
            for column in range(image.columns):
                text += f"{_FENCE}<row_{row + 1}_col_{column + 1}>{vectors}"
            text += "\n"
        text += ("\n" if image.rows else "") + f"{_FENCE}{_GLOBAL}{vectors}{_FENCE}"
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def count(self, ids: Sequence[int]) -> int:
        """Placeholders in a prompt as it is written: one for each image."""
        return list(ids).count(self.image_token_id)


def _read_processor(files: ModelFiles) -> Any:
    try:
        import PIL  # noqa: F401 (an optional dependency)
    except ImportError:
        raise ConfigError(
            f"model {files.name!r} takes images, for which Pillow is not installed: pip install "
            f"'specdec-core[images]', or {WITHOUT}"
        ) from None
    from transformers import AutoImageProcessor

    logger = logging.getLogger("transformers")
    before = logger.level
    logger.setLevel(logging.ERROR)  # that torchvision is not there is no fault
    try:
        return AutoImageProcessor.from_pretrained(files.path, trust_remote_code=files.trust_remote_code)
    except Exception as error:  # transformers documents no set of errors for what the files may hold
        raise ConfigError(
            f"{files.path} has no image processor that can be read ({error}): fetch its "
            f"preprocessor_config.json, or {WITHOUT}"
        ) from error
    finally:
        logger.setLevel(before)
