"""Any causal language model of transformers on our paged KV, through transformers' attention interface.

The model's own code computes everything but attention: that is a function of ours, registered with
transformers, which writes each layer's keys and values into the paged cache and attends over it as the
step's metadata says. All rows of a step are one packed sequence with explicit positions.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, ClassVar

import attrs
import torch
from specdec_kernels.attention import AttentionMetadata

from specdecode.contract import ConfigError
from specdecode.layers import AttentionBackend, KVCache
from specdecode.layers.adapters import TokenAdapters
from specdecode.layers.attention import TorchBackend

from .capturing import Capturable

#: Name of our function in transformers' table of attention implementations.
ATTENTION = "specdecode_paged"

#: What models hand to attention that does not change its result here: the positions are in the keys,
#: the mask is the metadata's, and the rest says what to return or how to train.
_IGNORED = frozenset(
    {
        "cache", "cache_position", "dropout", "logits_to_keep", "output_attentions", "output_hidden_states",
        "output_router_logits", "past_key_value", "past_key_values", "position_embeddings", "position_ids",
        "return_dict", "use_cache",
    }
)  # fmt: skip

#: What some of the rest are called outside of transformers' code.
_OPTIONS = {
    "softcap": "soft-capped attention scores",
    "s_aux": "attention sinks",
    "position_bias": "a bias by position on attention scores",
}


@attrs.frozen(kw_only=True)
class TransformersConfig:
    """Shape of a model that transformers runs; the KV of all layers is alike."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  #: of queries and keys
    value_dim: int


@attrs.frozen(eq=False)
class _Step:
    """What attention must know of the forward that runs."""

    meta: AttentionMetadata
    caches: Sequence[KVCache]
    backend: AttentionBackend


_step: ContextVar[_Step] = ContextVar("specdecode_step")


class TransformersDecoder(torch.nn.Module):
    """The same as :class:`~specdecode.models.Decoder` to its users, around a model of transformers.

    Args:
        model: a ``...ForCausalLM`` made with ``attn_implementation=ATTENTION``.
        max_model_len: positions beyond it are read as the last one, so that tables of learned
            positions are never left.
        backend: of the attention layers; None: the torch references.

    Raises:
        ConfigError: the model cannot be driven so; the reason is named.
    """

    config: TransformersConfig
    #: What is of this module in a step is static: the context of a forward and the states it is given are
    #: set by the host before kernels are launched, and a replay launches the same kernels on the same
    #: tensors. Whether the model's own code is, nobody knows before it is tried.
    capturable: ClassVar[Capturable] = Capturable.TRIED

    def __init__(
        self,
        model: Any,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
        backend: AttentionBackend | None = None,
    ) -> None:
        super().__init__()
        self.model = model.eval()
        self.dtype = dtype
        self.device = device
        self.max_model_len = max_model_len
        self.backend = backend or TorchBackend()
        self.adapters: TokenAdapters | None = None  # there is no room for any
        self._given: torch.Tensor | None = None
        body = model.get_decoder()
        self._body = [body]  # in a list: its weights are the model's already
        self._blocks = [_blocks(body, model.config.num_hidden_layers)]
        if "position_ids" not in inspect.signature(body.forward).parameters:
            raise ConfigError(
                f"{type(body).__name__} of transformers takes no positions, so rows of a step cannot be told "
                "apart; use another model"
            )
        # There is no padding, and looking for it would wait for the device at every step.
        body.warn_if_padding_and_no_attention_mask = lambda *_: None
        self._intercept(body)

    @property
    def body(self) -> Any:
        """Token ids to hidden states: the model without its output layer."""
        return self._body[0]

    @property
    def code(self) -> str:
        """What computes its steps, as messages call it."""
        return f"{type(self.model).__name__} of transformers"

    @property
    def kv_heads(self) -> int:
        """KV heads that this rank computes: all, since there is one."""
        return self.config.num_kv_heads

    @property
    def embed_tokens(self) -> torch.nn.Module:
        """``[T] -> [T, H]``."""
        embedding: torch.nn.Module = self.model.get_input_embeddings()
        return embedding

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        meta: AttentionMetadata,
        caches: Sequence[KVCache],
        taps: Collection[int] = (),
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """As :meth:`specdecode.models.Decoder.forward`."""
        return self._compute({"input_ids": ids.unsqueeze(0)}, positions, meta, caches, taps)

    def forward_embedded(
        self,
        embedded: torch.Tensor,
        positions: torch.Tensor,
        meta: AttentionMetadata,
        caches: Sequence[KVCache],
        taps: Collection[int] = (),
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """The same from ``[T, H]`` that stand for the tokens' embeddings."""
        return self._compute({"inputs_embeds": embedded.unsqueeze(0)}, positions, meta, caches, taps)

    def _compute(
        self,
        inputs: Mapping[str, torch.Tensor],
        positions: torch.Tensor,
        meta: AttentionMetadata,
        caches: Sequence[KVCache],
        taps: Collection[int],
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        tapped: dict[int, torch.Tensor] = {}
        token = _step.set(_Step(meta, caches, self.backend))
        try:
            with self._tapping(taps, tapped):
                output = self.body(
                    **inputs,
                    position_ids=positions.clamp(max=self.max_model_len - 1).unsqueeze(0),
                    use_cache=False,
                )
        finally:
            _step.reset(token)
        return output.last_hidden_state[0], tuple(tapped[boundary] for boundary in taps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[R, H]`` after the final norm -> ``[R, V]``."""
        return self.compute_logits(hidden)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[R, H]`` after the final norm -> ``[R, V]`` float32, with the model's own scale and cap.

        The model's own forward makes them: its body, when called from there, gives ``hidden``.
        """
        self._given = hidden.unsqueeze(0)
        try:
            ids = torch.zeros((1, hidden.shape[0]), dtype=torch.int64, device=hidden.device)
            logits: torch.Tensor = self.model(input_ids=ids, use_cache=False).logits
        finally:
            self._given = None
        return logits[0].float()

    def _intercept(self, body: Any) -> None:
        compute = body.forward

        def forward(*args: Any, **options: Any) -> Any:
            return compute(*args, **options) if self._given is None else _Given(self._given)

        body.forward = forward

    @contextlib.contextmanager
    def _tapping(self, taps: Collection[int], tapped: dict[int, torch.Tensor]) -> Iterator[None]:
        """Fill ``tapped`` with the residual stream at the boundaries ``taps`` while blocks run."""
        blocks = self._blocks[0]

        def entering(boundary: int) -> Any:
            def hook(_: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
                tapped[boundary] = (args[0] if args else options["hidden_states"])[0]

            return hook

        def leaving(_: Any, args: Any, output: Any) -> None:
            stream = output if isinstance(output, torch.Tensor) else output[0]
            tapped[len(blocks)] = stream[0]

        with contextlib.ExitStack() as handles:
            for boundary in taps:
                if boundary == len(blocks):
                    handles.enter_context(blocks[-1].register_forward_hook(leaving))
                else:
                    block = blocks[boundary]
                    hook = block.register_forward_pre_hook(entering(boundary), with_kwargs=True)
                    handles.enter_context(hook)
            yield


class _Given:
    """Stands for a body's output that holds its last hidden state and nothing else."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]


def _blocks(body: Any, count: int) -> torch.nn.ModuleList:
    for module in body.children():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return module
    raise ConfigError(
        f"{type(body).__name__} of transformers holds no list of {count} layers, so it cannot be driven "
        "here; use another model"
    )


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it, on the paged cache of the step that runs.

    Args:
        query: ``[1, Hq, T, Dk]``; ``key`` ``[1, Hkv, T, Dk]``; ``value`` ``[1, Hkv, T, Dv]``.

    Returns:
        ``[1, T, Hq, Dv]``.
    """
    name = type(module).__name__
    if attention_mask is not None:
        raise ConfigError(
            f"{name} of transformers makes an attention mask of its own (by ALiBi or other rules), which "
            "paged attention does not follow; use another model"
        )
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    if not causal:
        raise ConfigError(f"{name} of transformers is not causal; use a causal language model")
    for option, setting in options.items():
        if option not in _IGNORED and setting is not None and setting is not False:
            raise ConfigError(
                f"{name} of transformers asks for {_OPTIONS.get(option, option)} ({option}), which paged "
                "attention does not do in this version; use another model"
            )
    layer = getattr(module, "layer_idx", None)
    if layer is None:
        raise ConfigError(f"{name} of transformers does not say which layer it is; use another model")
    step = _step.get()
    cache = step.caches[layer]
    dtype = value.dtype
    queries, keys, values = (heads[0].transpose(0, 1).to(dtype).contiguous() for heads in (query, key, value))
    step.backend.write(keys, values, cache, step.meta)
    scale = queries.shape[-1] ** -0.5 if scaling is None else scaling
    attended = step.backend.attend(queries, cache, step.meta, scale=scale, window=sliding_window)
    return attended.unsqueeze(0), None


def register_attention() -> None:
    """Make :data:`ATTENTION` known to transformers; no mask function, so models make no mask for it."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attention)
