"""Images in prompts: the families that take them, their processor, and their vision tower."""

from .config import VISION_FAMILIES, VisionConfig
from .image import ProcessedImage, PromptImage
from .preprocess import ImagePreprocessor
from .tower import VisionTower

__all__ = [
    "VISION_FAMILIES", "ImagePreprocessor", "ProcessedImage", "PromptImage", "VisionConfig", "VisionTower",
]  # fmt: skip
