"""A head as its checkpoint describes it: sizes from the tensors' shapes first, from config.json second."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import attrs
import numpy as np
from specdecode.contract import CheckpointInfo, ConfigError, TargetInfo, Unsupported
from specdecode.heads.tokenizers import check_tokenizer
from specdecode.heads.vocabulary import draft_ids, is_padding

from .config import Eagle3Config, EagleConfig
from .dummy import dummy_tensors
from .fields import Fields, read_fields
from .names import canonical_names
from .recognition import kind_of

Boundary = int | Literal["final"]
_LAYER = re.compile(r"^layers\.(\d+)\.")


@attrs.frozen(kw_only=True, eq=False)
class HeadSpec:
    """All that building the head takes; nothing of its weights but the map of a reduced vocabulary."""

    path: Path
    dummy: bool  #: there are no weights to be read, random ones will do
    eagle3: bool
    names: Mapping[str, str]  #: canonical name -> stored name
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    hidden_act: str
    rope: Mapping[str, Any]
    max_positions: int
    vocab_size: int  #: the target's
    lm_head_rows: int | None  #: of an output layer of its own that are used; None: the target's layer
    draft_ids: np.ndarray | None  #: ``[Vd]``: the target's id of each draft id; None: they are the same
    boundaries: tuple[Boundary, ...]  #: of the target, in the order in which they are fused
    norm_before_residual: bool
    norm_output: bool
    proposed_tokens: int | None

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds that tensor."""
        return name in self.names


def read_head(config: EagleConfig, draft: CheckpointInfo, target: TargetInfo) -> HeadSpec:
    """Judge a checkpoint against the method and the target.

    Raises:
        Unsupported: a variant that is not built, or a target that it cannot be for.
        ConfigError: missing tensors, wrong shapes, a map that points outside, another tokenizer.
    """
    where = f"speculative_config.model: the checkpoint {draft.path}"
    if draft.dummy:
        fields = read_fields(draft, where, config.method, config.rope_parameters)
        tensors = dummy_tensors(fields, target, draft, eagle3=config.method == "eagle3")
        draft = attrs.evolve(draft, tensors=tensors)
    kind, reason = kind_of(draft)
    if kind is not None and kind != config.method:
        raise ConfigError(f"{where} is of method {kind!r}, since {reason}; set method to {kind!r}")
    names = canonical_names(draft.tensors, where)
    fields = read_fields(draft, where, config.method, config.rope_parameters)
    shapes = {name: draft.tensors[stored].shape for name, stored in names.items()}
    return _Reading(config, draft, target, fields, names, shapes, where).spec()


@attrs.define
class _Reading:
    """One checkpoint being read."""

    config: EagleConfig
    draft: CheckpointInfo
    target: TargetInfo
    fields: Fields
    names: dict[str, str]
    shapes: dict[str, tuple[int, ...]]
    where: str

    def spec(self) -> HeadSpec:
        eagle3, fields = self.config.method == "eagle3", self.fields
        layers = 1 + max((int(m[1]) for name in self.shapes if (m := _LAYER.match(name))), default=0)
        layers = max(layers, fields.num_layers)
        self._require(_required(eagle3, layers))
        hidden = self.shapes["layers.0.self_attn.o_proj.weight"][0]
        queries = self.shapes["layers.0.self_attn.q_proj.weight"][0]
        keys = self.shapes["layers.0.self_attn.k_proj.weight"][0]
        if fields.hidden_size not in (None, hidden):
            raise ConfigError(
                f"{self.where} does not fit its config.json: hidden_size is {fields.hidden_size}, "
                f"{self.names['layers.0.self_attn.o_proj.weight']} has {hidden} rows"
            )
        head_dim = queries // fields.num_heads
        if queries % fields.num_heads or keys % head_dim or fields.head_dim not in (None, head_dim):
            raise ConfigError(
                f"{self.where}: {self.names['layers.0.self_attn.q_proj.weight']} has {queries} rows and "
                f"k_proj {keys}, which do not fit num_attention_heads {fields.num_heads} and "
                f"head_dim {fields.head_dim}"
            )
        intermediate = self.shapes["layers.0.mlp.gate_proj.weight"][0]
        boundaries = self._boundaries(eagle3)
        self._check_target(hidden, eagle3)
        rows = self.shapes.get("lm_head.weight", (None,))[0]
        expected = self._expected(eagle3, layers, hidden, queries, keys, intermediate, len(boundaries))
        self._check_shapes(expected)
        ids, rows = self._vocabulary(rows, hidden)
        check_tokenizer(self.draft.path, self.target.path, self.where)
        return HeadSpec(
            path=self.draft.path,
            dummy=self.draft.dummy,
            eagle3=eagle3,
            names=self.names,
            hidden_size=hidden,
            target_hidden_size=self.target.hidden_size,
            intermediate_size=intermediate,
            num_layers=layers,
            num_heads=fields.num_heads,
            num_kv_heads=keys // head_dim,
            head_dim=head_dim,
            rms_norm_eps=fields.rms_norm_eps,
            hidden_act=fields.hidden_act,
            rope=fields.rope,
            max_positions=fields.max_positions,
            vocab_size=self.target.vocab_size,
            lm_head_rows=rows,
            draft_ids=ids,
            boundaries=boundaries,
            norm_before_residual=fields.norm_before_residual,
            norm_output=fields.norm_output,
            proposed_tokens=fields.proposed_tokens,
        )

    # -- the target -----------------------------------------------------------------------------
    def _boundaries(self, eagle3: bool) -> tuple[Boundary, ...]:
        if not eagle3 or (not self.fields.use_aux and "fc.weight" not in self.shapes):
            return ("final",)
        if not self.fields.use_aux:
            raise ConfigError(
                f"{self.where}: config.json says use_aux_hidden_state=false, yet there is an fc.weight"
            )
        config, count = self.config, self.target.num_layers
        assert isinstance(config, Eagle3Config)
        ids = config.aux_layer_ids or self.fields.aux_layer_ids
        if "fc.weight" not in self.shapes:
            if ids is None:
                raise ConfigError(
                    f"{self.where} lacks fc.weight, which joins hidden states of the target, and its "
                    "config.json does not say use_aux_hidden_state=false; fetch it again"
                )
            self._require(["fc.weight"])
        if ids is None:
            boundaries: tuple[int, ...] = (2, count // 2, count - 3)
        elif config.aux_layer_convention == "outputs" or (
            config.aux_layer_convention == "auto" and ids[0] == 1
        ):
            boundaries = tuple(layer + 1 for layer in ids)
        else:
            boundaries = tuple(ids)
        if any(not 0 <= boundary <= count for boundary in boundaries):
            raise Unsupported(
                f"{self.where} reads the hidden states that enter layers {list(boundaries)}; the target has "
                f"{count} layers: set aux_layer_ids, and aux_layer_convention if they mean outputs"
            )
        return boundaries

    def _check_target(self, hidden: int, eagle3: bool) -> None:
        own = self.target.hidden_size
        shared = not eagle3 or "fc.weight" not in self.shapes or "embed_tokens.weight" not in self.shapes
        if shared and hidden != own:
            raise ConfigError(
                f"{self.where} has hidden size {hidden}, the target {own}: it was made for another target"
                + (", or lacks embed_tokens.weight" if eagle3 else "")
            )
        if self.fields.target_hidden_size not in (None, own):
            raise ConfigError(
                f"{self.where} is for a target of hidden size {self.fields.target_hidden_size} "
                f"(target_hidden_size), this one has {own}"
            )

    def _vocabulary(self, rows: int | None, hidden: int) -> tuple[np.ndarray | None, int | None]:
        """The map of draft ids, and how many rows of the head's own output layer are used."""
        size, fields = self.target.vocab_size, self.fields
        table = self.shapes.get("embed_tokens.weight", (fields.vocab_size or size,))[0]
        for known, what in ((fields.vocab_size, "vocab_size"), (table, "the rows of embed_tokens.weight")):
            if known is not None and not is_padding(known, size):
                raise ConfigError(
                    f"{self.where} was made for another vocabulary: {what} is {known}, the target has {size}"
                )
        ids = draft_ids(self.draft, self.names, rows, size, self.where)
        if rows is None and hidden != self.target.hidden_size:
            raise ConfigError(
                f"{self.where} lacks lm_head.weight, and has not the target's hidden size to share its"
            )
        reduced = fields.draft_vocab_size not in (None, fields.vocab_size)
        if not {"d2t", "t2d", "token_map"} & self.names.keys() and (
            reduced or (rows is not None and not is_padding(rows, size))
        ):
            raise ConfigError(
                f"{self.where} has a draft vocabulary of {rows or fields.draft_vocab_size} of {size} and no "
                "map d2t or t2d; fetch it again"
            )
        return ids, rows if rows is None or ids is not None else min(rows, size)

    # -- tensors --------------------------------------------------------------------------------
    def _require(self, wanted: list[str]) -> None:
        if missing := [name for name in wanted if name not in self.shapes]:
            shown = ", ".join(missing[:6]) + (", ..." if len(missing) > 6 else "")
            raise ConfigError(
                f"{self.where} lacks {len(missing)} tensors of an {self.config.method} head ({shown}); fetch "
                "it again, or see whether it is one"
            )

    def _expected(
        self, eagle3: bool, layers: int, hidden: int, queries: int, keys: int, mlp: int, taps: int
    ) -> dict[str, tuple[int | None, ...]]:
        """Canonical name -> shape of all that a head may hold; None: any size."""
        target = self.target.hidden_size
        expected: dict[str, tuple[int | None, ...]] = {
            "embed_tokens.weight": (None, hidden),
            "lm_head.weight": (None, hidden),
            "fc.weight": (hidden, taps * target if eagle3 else 2 * hidden),
            "fc.bias": (hidden,),
            "d2t": (None,),
            "t2d": (None,),
            "token_map": (None,),
        }
        if eagle3:
            expected |= {"norm.weight": (hidden,), "layers.0.hidden_norm.weight": (hidden,)}
            if self.fields.norm_before_fc:
                expected["input_norm.weight"] = (taps * target,)
            if self.fields.fc_norm:
                expected |= {f"fc_norm.{tap}.weight": (target,) for tap in range(taps)}
        else:
            expected |= {"embedding_layernorm.weight": (hidden,), "pre_lm_head_layernorm.weight": (hidden,)}
        for layer in range(layers):
            inputs = 2 * hidden if eagle3 and layer == 0 else hidden
            for module, rows, columns in (
                ("self_attn.q_proj", queries, inputs),
                ("self_attn.k_proj", keys, inputs),
                ("self_attn.v_proj", keys, inputs),
                ("self_attn.o_proj", hidden, queries),
                ("mlp.gate_proj", mlp, hidden),
                ("mlp.up_proj", mlp, hidden),
                ("mlp.down_proj", hidden, mlp),
            ):
                expected[f"layers.{layer}.{module}.weight"] = (rows, columns)
                expected[f"layers.{layer}.{module}.bias"] = (rows,)
            for norm in ("input_layernorm", "post_attention_layernorm"):
                expected[f"layers.{layer}.{norm}.weight"] = (hidden,)
        return expected

    def _check_shapes(self, expected: Mapping[str, tuple[int | None, ...]]) -> None:
        faults, unknown = [], []
        for name, shape in self.shapes.items():
            if name not in expected:
                unknown.append(self.names[name])
            elif len(shape) != len(expected[name]) or any(
                want not in (None, size) for size, want in zip(shape, expected[name], strict=True)
            ):
                fitting = ", ".join("any" if size is None else str(size) for size in expected[name])
                faults.append(
                    f"{self.where}: {self.names[name]} has shape {list(shape)}, expected [{fitting}]"
                )
        wanted = [*self.fields.announced, *(name for name in expected if name.startswith("fc_norm."))]
        if missing := [name for name in wanted if name not in self.shapes]:
            faults.append(f"{self.where} lacks {', '.join(missing)}, which its config.json announces")
        if unknown:
            shown = ", ".join(unknown[:6]) + (", ..." if len(unknown) > 6 else "")
            faults.append(
                f"{self.where} holds {len(unknown)} tensors that no {self.config.method} head of this plugin "
                f"has ({shown}): another variant, or a switch missing in its config.json"
            )
        for kind, modules in _BIASES.items():
            for layer in range(1 + max(int(m[1]) for n in self.shapes if (m := _LAYER.match(n)))):
                have = {f"layers.{layer}.{module}.bias" in self.shapes for module in modules}
                if len(have) > 1:
                    faults.append(f"{self.where} has biases in some of layer {layer}'s {kind} only")
        if faults:
            raise ConfigError(*faults)


_BIASES = {
    "queries, keys and values": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "MLP": ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
}


def _required(eagle3: bool, layers: int) -> list[str]:
    names = [
        f"layers.{layer}.{module}.weight"
        for layer in range(layers)
        for module in (
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "self_attn.o_proj",
            "mlp.gate_proj",
            "mlp.up_proj",
            "mlp.down_proj",
            "post_attention_layernorm",
        )
    ]
    names += [f"layers.{layer}.input_layernorm.weight" for layer in range(0 if eagle3 else 1, layers)]
    return names + (["layers.0.hidden_norm.weight", "norm.weight"] if eagle3 else ["fc.weight"])
