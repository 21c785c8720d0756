"""Building blocks of models, for core's decoder and for draft plugins."""

from .adapters import TokenAdapters
from .attention import Attention, AttentionBackend, KVCache, RotatingBackend, Rotation, TorchBackend
from .embedding import GivenEmbeddings, VocabEmbedding
from .linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    VocabParallelLinear,
)
from .norm import RMSNorm
from .rotary import RopeConfig, RotaryEmbedding

__all__ = [
    "Attention", "AttentionBackend", "ColumnParallelLinear", "GivenEmbeddings", "KVCache",
    "MergedColumnParallelLinear", "QKVParallelLinear", "RMSNorm", "RopeConfig", "RotaryEmbedding",
    "RotatingBackend", "Rotation", "RowParallelLinear", "TokenAdapters", "TorchBackend", "VocabEmbedding",
    "VocabParallelLinear",
]  # fmt: skip
