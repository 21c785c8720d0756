"""The vision tower and its connector: transformers' classes, with the weights of the target's checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from specdecode.contract import ConfigError

from ..weights import load_weights, stored_tensors
from .config import VISION_FAMILIES
from .image import ProcessedImage

if TYPE_CHECKING:
    from ..files import ModelFiles

#: Of the whole model, what is the tower's.
_PARTS = ("vision_model.", "connector.")
#: Most tiles computed at a time; a part of what the bits of an image's vectors depend on.
TILES = 8
#: Standard deviation and seed of dummy weights.
_DUMMY_STD, _DUMMY_SEED = 0.02, 0


class VisionTower:
    """Pixels to vectors of the text model's hidden size; an image is computed alone."""

    def __init__(
        self, files: ModelFiles, *, dtype: torch.dtype, device: torch.device, load_format: str = "auto"
    ) -> None:
        """Build the tower of ``files.vision`` and give it weights.

        Args:
            load_format: "dummy" for seeded random weights.

        Raises:
            ConfigError: tensors are missing or of another shape.
        """
        self.device = device
        self._model = _without_text(files)
        if load_format == "dummy":
            self._model = self._model.to_empty(device=device).to(dtype)
            generator = torch.Generator(device).manual_seed(_DUMMY_SEED)
            for parameter in self._model.parameters():
                parameter.data.normal_(0.0, _DUMMY_STD, generator=generator)
        else:
            _load(self._model, files, dtype, device)
        self._model.eval().requires_grad_(False)

    @property
    def num_bytes(self) -> int:
        """Of its weights."""
        return sum(parameter.nbytes for parameter in self._model.parameters())

    @torch.inference_mode()
    def encode(self, image: ProcessedImage) -> torch.Tensor:
        """``[P, H]`` in the target's dtype, tile after tile."""
        parts = [
            self._features(pixels, mask)
            for pixels, mask in zip(image.pixels.split(TILES), image.mask.split(TILES), strict=True)
        ]
        return torch.cat(parts)

    def run_largest(self) -> None:
        """Compute as many tiles as are ever computed at a time, of noise: for who measures it."""
        vision = self._model.config.vision_config
        pixels = torch.rand(TILES, vision.num_channels, vision.image_size, vision.image_size)
        with torch.inference_mode():
            self._features(pixels, torch.ones_like(pixels[:, 0], dtype=torch.bool))

    def _features(self, pixels: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        found = self._model.get_image_features(
            pixel_values=pixels[None].to(self.device), pixel_attention_mask=mask[None].to(self.device)
        )
        found = getattr(
            found, "pooler_output", found
        )  # of some versions a tensor, of others one for each image
        if not isinstance(found, torch.Tensor):
            found = torch.cat(list(found))
        return found.flatten(0, -2)


def _without_text(files: ModelFiles) -> Any:
    """The whole model on no device, its text model taken out: tower, connector and how they are called."""
    import transformers

    assert files.vision is not None
    config = copy.deepcopy(files.vision.hf_config)
    config.get_text_config().num_hidden_layers = 0
    with torch.device("meta"):
        model = getattr(transformers, VISION_FAMILIES[files.vision.architecture])(config)
    del model.text_model
    return model


def _load(model: Any, files: ModelFiles, dtype: torch.dtype, device: torch.device) -> None:
    stored = {tensor.name: tensor for tensor in stored_tensors(files.path)}
    expected = dict(model.named_parameters())
    names = {name: own for name in stored if (own := name.removeprefix("model.")).startswith(_PARTS)}
    if missing := sorted(set(expected) - set(names.values())):
        raise ConfigError(
            f"the checkpoint {files.path} lacks {len(missing)} tensors of the vision tower "
            f"({', '.join(missing[:4])}); fetch it again, or see whether config.json is its own"
        )
    for name, own in names.items():
        if own in expected and stored[name].shape != tuple(expected[own].shape):
            raise ConfigError(
                f"tensor {name} of the checkpoint {files.path} does not fit its config.json: expected shape "
                f"{list(expected[own].shape)}, got {list(stored[name].shape)}"
            )

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in load_weights(
            files.path, [name for name, own in names.items() if own in expected]
        ):
            yield names[name], tensor.to(device, dtype)

    model.load_state_dict(dict(tensors()), assign=True)
