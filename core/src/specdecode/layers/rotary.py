"""Rotary position embedding: one table of cosines and sines for each model."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import attrs
import torch
from specdec_kernels.rotary import apply_rotary

from specdecode.contract import MAX_SPECULATIVE_TOKENS, ConfigError

__all__ = ["RopeConfig", "RotaryEmbedding", "apply_rotary"]

#: A drafter may run a row past its context and have the result dropped: the table reaches that far.
_SLACK = MAX_SPECULATIVE_TOKENS


@attrs.frozen(kw_only=True)
class RopeConfig:
    """The rope fields of a Hugging Face config.

    ``parameters`` is its ``rope_parameters``: ``rope_theta``, ``rope_type`` and what the type wants.
    """

    head_dim: int
    max_position_embeddings: int
    parameters: Mapping[str, Any] = attrs.field(converter=lambda m: copy.deepcopy(dict(m)))

    @property
    def type(self) -> str:
        return self.parameters.get("rope_type") or self.parameters.get("type") or "default"

    def inverse_frequencies(self, length: int) -> tuple[torch.Tensor, float]:
        """``[R/2]`` float32 and the factor of cosine and sine, for sequences of up to ``length`` tokens.

        In types ``dynamic`` and ``longrope`` the frequencies depend on the length of the sequence.
        transformers goes by the length so far, so that what it computes for a position depends on
        how far the sequence has come when it is computed; here ``length`` alone decides, for every
        position. Both agree while ``length`` is within the length the model was trained on, and
        for a prompt of ``length`` tokens.
        """
        from transformers import LlamaConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        if self.type == "default":
            dim = int(self.head_dim * self.parameters.get("partial_rotary_factor", 1.0))
            exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
            return 1.0 / self.parameters["rope_theta"] ** exponents, 1.0
        if self.type not in ROPE_INIT_FUNCTIONS:
            known = ", ".join(sorted({"default", *ROPE_INIT_FUNCTIONS}))
            raise ConfigError(f"rope_type {self.type!r} of the model's config is unknown; known are {known}")
        # The functions want a config; this one carries nothing else.
        carrier = LlamaConfig(
            hidden_size=self.head_dim,
            num_attention_heads=1,
            head_dim=self.head_dim,
            max_position_embeddings=self.max_position_embeddings,
            rope_parameters=copy.deepcopy(dict(self.parameters)),
        )
        frequencies, factor = ROPE_INIT_FUNCTIONS[self.type](carrier, torch.device("cpu"), seq_len=length)
        return frequencies.float(), float(factor)


class RotaryEmbedding(torch.nn.Module):
    """Cosines and sines of the positions below ``max_model_len``, computed in float32."""

    cos: torch.Tensor  #: ``[max_model_len + slack, R/2]``
    sin: torch.Tensor

    def __init__(self, config: RopeConfig, max_model_len: int, *, device: torch.device) -> None:
        super().__init__()
        frequencies, factor = config.inverse_frequencies(max_model_len)
        positions = torch.arange(max_model_len + _SLACK, dtype=torch.float32)
        angles = torch.outer(positions, frequencies)
        self.register_buffer("cos", (angles.cos() * factor).to(device), persistent=False)
        self.register_buffer("sin", (angles.sin() * factor).to(device), persistent=False)

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``[T]`` int64 -> cosine and sine, each ``[T, R/2]`` float32."""
        return self.cos[positions], self.sin[positions]
