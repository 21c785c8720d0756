"""A head with the weights of its checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from specdecode.contract import EMBED, LM_HEAD, ConfigError, TargetHandle
from specdecode.heads.loading import fill_rows, pack_linears
from specdecode.layers import ColumnParallelLinear
from specdecode.models import DecoderLayer, randomize

from .head import EagleHead
from .spec import HeadSpec

#: Rows of a table compared at a time.
_ROWS = 1 << 14
#: Unit vectors that the target's output layer is asked for at a time.
_UNITS = 256
#: What a drafter has no use for, or has read already.
_MAPS = frozenset({"d2t", "t2d", "token_map"})


@torch.inference_mode()
def load_head(spec: HeadSpec, target: TargetHandle) -> EagleHead:
    """Build the head on the target's device, in its dtype, and fill it.

    A table of embeddings that is a copy of the target's is dropped, and the target's used.

    Raises:
        ConfigError: the files hold less than their headers said.
    """
    head = EagleHead(
        spec,
        target_embed=target.modules.get(EMBED),
        target_lm_head=target.modules.get(LM_HEAD),
        max_model_len=target.info.max_model_len,
        dtype=target.dtype,
        device=target.device,
    )
    if spec.dummy:
        randomize(head)
        return head.eval()
    if head.lm_head is None and head.draft_ids is not None:
        head.lm_head = ColumnParallelLinear(
            spec.hidden_size, len(head.draft_ids), dtype=target.dtype, device=target.device
        )
        head.borrows_rows = True
        _borrow_rows(head)
    stored = {name: canonical for canonical, name in spec.names.items()}
    missing = set(spec.names) - _MAPS
    for name, tensor in target.load_weights(spec.path):
        canonical = stored.get(name)
        if canonical is None or canonical in _MAPS:
            continue
        _fill(head, canonical, tensor)
        missing.discard(canonical)
    if missing:
        raise ConfigError(f"the checkpoint {spec.path} lost {', '.join(sorted(missing))} while it was read")
    if head.embed_tokens is not None and _is_copy(head.embed_tokens, head.target_embed, spec.vocab_size):
        head.embed_tokens = None
    if not head.fused:
        pack_linears(head, target.dtype, target.device)
    return head.eval()


def _fill(head: EagleHead, canonical: str, tensor: torch.Tensor) -> None:
    path, kind = canonical.rsplit(".", 1)
    if path in ("embed_tokens", "lm_head"):
        fill_rows(getattr(head, path).weight.data, tensor)
        return
    if path == "layers.0.hidden_norm":
        path = "hidden_norm"
    part = None
    if path.startswith("layers."):
        _, layer, module = path.split(".", 2)
        module, part = DecoderLayer.FUSED.get(module, (module, None))
        path = f"layers.{layer}.{module}"
    module_: Any = head.get_submodule(path)
    module_.load(kind, tensor, part)


@torch.inference_mode()
def refresh(head: EagleHead) -> None:
    """Take from the target again what was copied from it, in place."""
    if head.borrows_rows and head.lm_head is not None:
        with head.lm_head.refilled():
            _borrow_rows(head)


def _borrow_rows(head: EagleHead) -> None:
    """Fill the output layer with the target's rows of the tokens that can be drafted.

    They are what the target's layer makes of unit vectors, so that they are those of any kind of layer,
    packed or not.
    """
    layer, ids, rows = head.target_lm_head, head.draft_ids, head.lm_head
    assert layer is not None and ids is not None and rows is not None
    units = torch.eye(rows.in_features, dtype=rows.weight.dtype, device=rows.weight.device)
    for start in range(0, rows.in_features, _UNITS):
        part = slice(start, start + _UNITS)
        rows.weight.data[:, part] = layer(units[part])[:, ids].T


def _is_copy(own: Any, theirs: Any, vocab_size: int) -> bool:
    if theirs is None:
        return False
    for start in range(0, vocab_size, _ROWS):
        ids = torch.arange(start, min(start + _ROWS, vocab_size), device=own.weight.device)
        if not torch.equal(own(ids), theirs(ids)):
            return False
    return True
