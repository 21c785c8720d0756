"""The layers as headers describe them: sizes from the tensors' shapes first, from configs second."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import attrs
from specdecode.contract import CheckpointInfo, ConfigError, PlanContext, TargetInfo, Unsupported
from specdecode.heads.tokenizers import check_tokenizer

from .fields import BlockFields, read_fields
from .layouts import NORMS, PROJECTION, Layout, find_modules

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_LOOKED_FOR = "mtp_layers.*, or layers.N.eh_proj and what belongs to it"
Shapes = Mapping[str, tuple[int, ...]]


@attrs.frozen(kw_only=True)
class NativeBlock:
    """An ordinary layer of the native decoder, as a module's tensors and a config describe it."""

    fields: BlockFields
    intermediate_size: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool


@attrs.frozen(kw_only=True, eq=False)
class MtpSpec:
    """All that building the modules takes."""

    path: Path
    layout: Layout
    names: tuple[Mapping[str, str], ...]  #: of each module: the one name -> the stored name
    hidden_size: int
    rms_norm_eps: float  #: of the norms around the block
    block: NativeBlock | None  #: None: a layer of transformers' class, like the target's last one
    num_kv_heads: int
    head_dim: int
    value_dim: int
    proposed_tokens: int


def read_spec(context: PlanContext) -> MtpSpec:
    """Judge the checkpoint that holds the modules: the one that was named, or the target's own.

    Raises:
        Unsupported: there are none, or of a kind that is not built.
        ConfigError: tensors are missing, too many, or do not fit the target.
    """
    target = context.target
    own = context.draft is None
    checkpoint = context.target_checkpoint if context.draft is None else context.draft
    where = (
        f"the target's checkpoint {checkpoint.path}"
        if own
        else f"speculative_config.model: the checkpoint {checkpoint.path}"
    )
    fields = read_fields(checkpoint, target, where)
    modules = find_modules(checkpoint, where)
    announced = target.extra_layers if own else fields.announced
    if modules is None:
        raise _none(where, announced, own)
    if announced > len(modules.names):
        raise ConfigError(
            f"{where} holds {len(modules.names)} multi-token-prediction layers, its config.json announces "
            f"{announced} (num_nextn_predict_layers); fetch it again"
        )
    if not own:
        check_tokenizer(checkpoint.path, target.path, where)
    native = fields.block is not None
    body = {} if native else _last_layer(context.target_checkpoint, target)
    blocks = []
    for names in modules.names:
        shapes = {name: checkpoint.tensors[stored].shape for name, stored in names.items()}
        block = {name: shape for name, shape in shapes.items() if name.startswith("block.")}
        around = {name: shape for name, shape in shapes.items() if name not in block}
        _check(around, _around(target.hidden_size), names, where)
        if fields.block is not None:
            blocks.append(_native(block, fields.block, target, names, where))
        else:
            _check(block, body, names, where)
    if any(block != blocks[0] for block in blocks):
        raise Unsupported(f"{where}: its multi-token-prediction layers are of different sizes")
    return MtpSpec(
        path=checkpoint.path,
        layout=modules.layout,
        names=modules.names,
        hidden_size=target.hidden_size,
        rms_norm_eps=fields.rms_norm_eps,
        block=blocks[0] if native else None,
        num_kv_heads=blocks[0].num_kv_heads if native else target.num_kv_heads,
        head_dim=blocks[0].head_dim if native else target.head_dim,
        value_dim=blocks[0].head_dim if native else target.value_dim or target.head_dim,
        proposed_tokens=fields.proposed_tokens or len(modules.names),
    )


def _none(where: str, announced: int, own: bool) -> Exception:
    if announced:
        return ConfigError(
            f"{where} holds no tensors of the {announced} multi-token-prediction layers that its config.json "
            "announces (num_nextn_predict_layers): uploads that were quantized or saved anew often lack "
            "them; use the original checkpoint, or set speculative_config.model to a directory that has them"
        )
    if own:
        return Unsupported(
            f"{where} carries no multi-token-prediction layers ({_LOOKED_FOR}); set "
            "speculative_config.model to a directory that holds them, or use another method"
        )
    return Unsupported(f"{where} holds no multi-token-prediction layers ({_LOOKED_FOR})")


def _around(hidden: int) -> dict[str, tuple[int, ...]]:
    """What is around every block."""
    return {**dict.fromkeys(NORMS, (hidden,)), PROJECTION: (hidden, 2 * hidden)}


def _last_layer(checkpoint: CheckpointInfo, target: TargetInfo) -> dict[str, tuple[int, ...]]:
    """The tensors of the target's last layer, which the block of a module is like."""
    prefix = f"model.layers.{target.num_layers - 1}."
    return {
        f"block.{name.removeprefix(prefix)}": info.shape
        for name, info in checkpoint.tensors.items()
        if name.startswith(prefix) and not name.endswith("rotary_emb.inv_freq")
    }


def _native(
    shapes: Shapes, block: BlockFields, target: TargetInfo, names: Mapping[str, str], where: str
) -> NativeBlock:
    """The block of a module whose target the native decoder runs."""
    hidden, heads = target.hidden_size, block.num_heads
    required = [f"block.{module}.weight" for module in (*_QKV, "self_attn.o_proj", *_MLP)]
    required += ["block.input_layernorm.weight", "block.post_attention_layernorm.weight"]
    if missing := [name for name in required if name not in shapes]:
        raise _lacks(missing, where)
    queries, keys = (shapes[f"block.{module}.weight"][0] for module in _QKV[:2])
    if block.head_dim and queries == 2 * heads * block.head_dim:
        raise Unsupported(
            f"{where}: {names['block.self_attn.q_proj.weight']} has {queries} rows, twice those of "
            f"{heads} heads: gated attention (Qwen3-Next, Qwen3.5), which is not supported"
        )
    head_dim = queries // heads
    if queries % heads or keys % max(head_dim, 1) or block.head_dim not in (None, head_dim):
        raise ConfigError(
            f"{where}: {names['block.self_attn.q_proj.weight']} has {queries} rows and k_proj {keys}, which "
            f"do not fit num_attention_heads {heads} and head_dim {block.head_dim}"
        )
    size = shapes["block.mlp.gate_proj.weight"][0]
    expected: dict[str, tuple[int, ...]] = {
        f"block.{norm}.weight": (hidden,) for norm in ("input_layernorm", "post_attention_layernorm")
    }
    optional = {f"block.self_attn.{norm}.weight": (head_dim,) for norm in ("q_norm", "k_norm")}
    for module, rows, columns in (
        *((module, rows, hidden) for module, rows in zip(_QKV, (queries, keys, keys), strict=True)),
        ("self_attn.o_proj", hidden, queries),
        *((module, size, hidden) for module in _MLP[:2]),
        (_MLP[2], hidden, size),
    ):
        expected[f"block.{module}.weight"] = (rows, columns)
        optional[f"block.{module}.bias"] = (rows,)
    _check(shapes, expected, names, where, optional)
    return NativeBlock(
        fields=block,
        intermediate_size=size,
        num_kv_heads=keys // head_dim,
        head_dim=head_dim,
        qkv_bias=_all(shapes, [f"block.{module}.bias" for module in _QKV], where),
        out_bias="block.self_attn.o_proj.bias" in shapes,
        mlp_bias=_all(shapes, [f"block.{module}.bias" for module in _MLP], where),
        qk_norm=_all(shapes, ["block.self_attn.q_norm.weight", "block.self_attn.k_norm.weight"], where),
    )


def _all(shapes: Shapes, names: list[str], where: str) -> bool:
    """Whether all of ``names`` are there; ConfigError if only some are."""
    missing = [name for name in names if name not in shapes]
    if missing and len(missing) < len(names):
        raise _lacks(missing, where)
    return not missing


def _check(
    shapes: Shapes, expected: Shapes, names: Mapping[str, str], where: str, optional: Shapes | None = None
) -> None:
    """Everything that is expected is there and nothing else is, all in shape."""
    if missing := [name for name in expected if name not in shapes]:
        raise _lacks(missing, where)
    known = {**(optional or {}), **expected}
    if unknown := [names[name] for name in shapes if name not in known]:
        raise ConfigError(
            f"{where} holds {len(unknown)} tensors that no such layer of its target has ({_few(unknown)}): "
            "another variant"
        )
    for name, shape in shapes.items():
        if shape != known[name]:
            raise ConfigError(
                f"{where}: {names[name]} has shape {list(shape)}, expected {list(known[name])}: it is of "
                "another target, or damaged"
            )


def _lacks(missing: list[str], where: str) -> ConfigError:
    return ConfigError(
        f"{where} lacks {len(missing)} tensors of a multi-token-prediction layer ({_few(missing)}); "
        "fetch it again"
    )


def _few(names: list[str], limit: int = 4) -> str:
    return ", ".join(names[:limit]) + (", ..." if len(names) > limit else "")
