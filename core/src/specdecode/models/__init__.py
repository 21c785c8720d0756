"""The native decoder and its families, the models of transformers, and loading of checkpoints."""

from .capturing import Capturable
from .config import DecoderConfig
from .decoder import MLP, Decoder, DecoderLayer, SelfAttention
from .families import FAMILIES, decoder_config
from .files import ModelFiles, resolve_model
from .fingerprint import fingerprint
from .fused import can_fuse, fused_layer, fused_write
from .info import (
    default_sampling,
    describe_target,
    eos_token_ids,
    resolve_device,
    resolve_dtype,
    resolve_max_model_len,
)
from .loader import load_model, randomize
from .packing import check_quantization, weight_bytes, why_not_exact
from .quantized import quantization_to_make, scheme_of
from .tokenizer import load_tokenizer, tokenizer_of
from .transformers_backend import TransformersDecoder
from .transformers_layer import TransformersLayer
from .transformers_support import check_architecture, is_native
from .updating import NewWeights, WeightSource, new_weights
from .vision import VISION_FAMILIES, ImagePreprocessor, ProcessedImage, PromptImage, VisionTower
from .weights import load_weights

__all__ = [
    "FAMILIES", "MLP", "VISION_FAMILIES", "Capturable", "Decoder", "DecoderConfig", "DecoderLayer",
    "ImagePreprocessor", "ModelFiles", "NewWeights", "ProcessedImage", "PromptImage", "SelfAttention",
    "TransformersDecoder", "TransformersLayer", "VisionTower", "WeightSource", "can_fuse",
    "check_architecture", "check_quantization", "decoder_config", "default_sampling", "describe_target",
    "eos_token_ids", "fingerprint", "fused_layer", "fused_write", "is_native", "load_model", "load_tokenizer",
    "load_weights", "new_weights", "quantization_to_make", "randomize", "resolve_device", "resolve_dtype",
    "resolve_max_model_len", "resolve_model", "scheme_of", "tokenizer_of", "weight_bytes", "why_not_exact",
]  # fmt: skip
