"""What the native decoder can be: one frozen config for all families."""

from __future__ import annotations

import attrs

from specdecode.contract import ConfigError
from specdecode.distributed import Share, head_shares, share_of
from specdecode.layers.rotary import RopeConfig

#: Values of a config's ``hidden_act`` -> the activation's name in :mod:`specdec_kernels.activation`.
ACTIVATIONS = {"silu": "silu_and_mul", "swish": "silu_and_mul", "gelu_pytorch_tanh": "gelu_tanh_and_mul"}


@attrs.frozen(kw_only=True)
class ExpertsConfig:
    """Mixtures of experts: gated MLPs of which a router gives each token a few."""

    num_experts: int
    count: int  #: experts of a token
    intermediate_size: int  #: of an expert
    normalize: bool  #: weights of a token's experts add up to 1
    layers: tuple[bool, ...]  #: whether each layer has one; the others have an MLP

    def share(self, rank: int, ranks: int, dim: int = 0) -> Share:
        """Of an expert's inner dimension, which is ``dim`` of a tensor, what a rank has."""
        what = "intermediate_size of an expert"
        return share_of(self.intermediate_size, rank, ranks, dim=dim, what=what)

    def __attrs_post_init__(self) -> None:
        if not 1 <= self.count <= self.num_experts:
            raise ConfigError(
                f"num_experts_per_tok of the model's config must be between 1 and its {self.num_experts} "
                f"experts, got {self.count}"
            )


@attrs.frozen(kw_only=True)
class DecoderConfig:
    """Shape and options of a pre-norm decoder with rotary attention and gated MLPs."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    windows: tuple[int | None, ...]  #: sliding window of each layer, None: full attention
    rotary_layers: tuple[bool, ...]  #: whether each layer rotates its queries and keys
    hidden_act: str = "silu"
    qkv_bias: bool = False
    out_bias: bool = False  #: of the attention's output projection
    mlp_bias: bool = False
    qk_norm: bool = False  #: RMS norm of each query and key head before the rotation
    experts: ExpertsConfig | None = None
    tie_word_embeddings: bool = False

    def experts_of(self, layer: int) -> ExpertsConfig | None:
        """The mixture of a layer; None: it has an MLP."""
        return self.experts if self.experts is not None and self.experts.layers[layer] else None

    @property
    def value_dim(self) -> int:
        """Of a value head."""
        return self.head_dim

    def check_ranks(self, ranks: int) -> None:
        """Raise ConfigError if the model cannot be shared out among ``ranks``."""
        head_shares(self.num_heads, self.num_kv_heads, 0, ranks)
        if self.experts is not None:
            self.experts.share(0, ranks)
        if any(self.experts_of(layer) is None for layer in range(self.num_layers)):
            share_of(self.intermediate_size, 0, ranks, what="intermediate_size")

    def __attrs_post_init__(self) -> None:
        if self.hidden_act not in ACTIVATIONS:
            raise ConfigError(
                f"hidden_act {self.hidden_act!r} of the model's config is not supported; "
                f"supported are {', '.join(ACTIVATIONS)}"
            )
        if self.num_layers < 1:
            raise ConfigError(
                f"num_hidden_layers of the model's config must be at least 1, got {self.num_layers}"
            )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_attention_heads {self.num_heads} of the model's config is no multiple of "
                f"num_key_value_heads {self.num_kv_heads}"
            )
        for name in ("windows", "rotary_layers"):
            if len(getattr(self, name)) != self.num_layers:
                raise ValueError(f"DecoderConfig.{name} wants one entry a layer")
