"""Families whose prompts may hold images, and what their configs say of both halves."""

from __future__ import annotations

import copy
from typing import Any

import attrs

#: ``architectures[0]`` of a config -> transformers' class of vision tower, connector and text model.
VISION_FAMILIES = {
    "Idefics3ForConditionalGeneration": "Idefics3Model",  # the first SmolVLM among them
    "SmolVLMForConditionalGeneration": "SmolVLMModel",
}


@attrs.frozen
class VisionConfig:
    """The config of a whole model of :data:`VISION_FAMILIES`."""

    architecture: str
    hf_config: Any = attrs.field(repr=False)

    @property
    def image_token_id(self) -> int:
        """The token that stands for a vector of an image, and in a prompt as it is written for an image."""
        return int(self.hf_config.image_token_id)

    def text_config(self) -> Any:
        """The config of its text model, as if that were a checkpoint of its own."""
        whole, text = self.hf_config, copy.deepcopy(self.hf_config.get_text_config())
        text.architectures = None  # what stands there is of no class of transformers
        for name in ("tie_word_embeddings", "dtype", "quantization_config"):
            if getattr(whole, name, None) is not None:
                setattr(text, name, getattr(whole, name))
        return text
