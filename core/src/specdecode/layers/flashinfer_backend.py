"""Attention by FlashInfer's kernels (Ye et al., arXiv 2501.01005), an optional package.

Its results depend on how a step's rows are planned together, so runs with it are not exact, and planning
reads the metadata on the host, so steps with it are not captured in CUDA graphs.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import numpy as np
import torch
from specdec_kernels.attention import AttentionMetadata

from ..contract.errors import ConfigError
from .attention import KVCache, TorchBackend

#: Bytes that FlashInfer's documentation recommends for the partial results of its split keys.
_WORKSPACE = 128 << 20
_DTYPES = (torch.float16, torch.bfloat16)


def flashinfer_backend(device: torch.device, dtype: torch.dtype) -> FlashInferBackend:
    """The backend for a model of ``dtype`` on ``device``.

    Raises:
        ConfigError: FlashInfer is not installed, or does not compute this.
    """
    if importlib.util.find_spec("flashinfer") is None:
        raise ConfigError(
            'attention_backend="flashinfer" needs FlashInfer, which is not installed: '
            "pip install flashinfer-python, or leave attention_backend out"
        )
    if device.type != "cuda" or dtype not in _DTYPES:
        raise ConfigError(
            f'attention_backend="flashinfer" is for float16 and bfloat16 on CUDA, not {dtype} on {device}: '
            "leave attention_backend out"
        )
    return FlashInferBackend(importlib.import_module("flashinfer"), device)


class FlashInferBackend(TorchBackend):
    """Attention by FlashInfer's paged prefill kernels, which serve decoding and verification as well.

    Args:
        module: the package ``flashinfer``.
        device: of the workspace, which all layers share.
    """

    def __init__(self, module: Any, device: torch.device) -> None:
        self._module = module
        self._workspace = torch.empty(_WORKSPACE, dtype=torch.uint8, device=device)
        # A wrapper holds one plan: of the metadata it was last made for.
        self._planned: dict[Any, tuple[Any, AttentionMetadata, torch.Tensor | None]] = {}

    def attend(
        self,
        query: torch.Tensor,
        cache: KVCache,
        meta: AttentionMetadata,
        *,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        if query.shape[0] == 0:
            return query.new_empty(*query.shape[:2], cache[1].shape[3])
        key = (window, scale, query.shape[1:], query.dtype, cache[0].shape[2:], cache[1].shape[3])
        wrapper, planned_for, blind = self._planned.get(key, (None, None, None))
        if wrapper is None:
            wrapper = self._module.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD")
        if planned_for is not meta:
            seen = _Seen(meta, window)
            wrapper.plan(
                **seen.pages(),
                num_qo_heads=query.shape[1],
                num_kv_heads=cache[0].shape[2],
                head_dim_qk=query.shape[2],
                head_dim_vo=cache[1].shape[3],
                page_size=meta.block_size,
                sm_scale=scale,
                q_data_type=query.dtype,
                kv_data_type=cache[0].dtype,
                **seen.masking(),
            )
            blind = seen.blind()
            self._planned[key] = (wrapper, meta, blind)
        out: torch.Tensor = wrapper.run(query, cache)
        return out if blind is None else out.index_fill_(0, blind, 0.0)


class _Seen:
    """What a step's tokens see, on the host, as FlashInfer wants to be told."""

    def __init__(self, meta: AttentionMetadata, window: int | None) -> None:
        rows, self._base, position, self._table = (
            tensor.cpu().numpy() for tensor in (meta.rows, meta.base, meta.positions, meta.block_table)
        )
        self._device, self._block_size, self._window = meta.rows.device, meta.block_size, window
        self._low = np.full_like(self._base, meta.first)
        self._extra = np.full((len(rows), 0), -1) if meta.extra is None else meta.extra.cpu().numpy()
        if window is not None:
            np.maximum(self._low, position - (window - 1), out=self._low)
            above = ((self._extra[:, None] > self._extra[:, :, None]) & (self._extra[:, :, None] >= 0)).sum(2)
            self._extra = np.where(above < window, self._extra, -1)
        self._extra = np.where(self._extra >= meta.first, self._extra, -1)
        self._rows, starts = np.unique(rows, return_index=True)
        self._bounds = np.append(starts, len(rows))
        highest = np.maximum(self._base - 1, self._extra.max(1, initial=-1))
        #: slots of each row; one at least, for a page may not be empty
        self._slots = np.maximum(np.maximum.reduceat(highest, starts) + 1, 1)
        self._causal = meta.first == 0 and not (self._extra >= 0).any() and self._ends_with_its_own_slots()

    def _ends_with_its_own_slots(self) -> bool:
        """Whether each row's last token sees all its slots, and each one before it one less."""
        return all(
            (self._base[begin:end] == slots - np.arange(end - begin)[::-1]).all()
            for begin, end, slots in zip(self._bounds[:-1], self._bounds[1:], self._slots, strict=True)
        )

    def pages(self) -> dict[str, torch.Tensor]:
        """Where each row's tokens and blocks begin, the blocks, and the slots of its last one."""
        counts = -(-self._slots // self._block_size)
        used = np.arange(self._table.shape[1]) < counts[:, None]
        return {
            "qo_indptr": self._tensor(self._bounds),
            "paged_kv_indptr": self._tensor(np.append(0, counts.cumsum())),
            "paged_kv_indices": self._tensor(self._table[self._rows][used]),
            "paged_kv_last_page_len": self._tensor((self._slots - 1) % self._block_size + 1),
        }

    def masking(self) -> dict[str, Any]:
        """The causal bound, if it is what the tokens see; else a mask of each token by its row's slots."""
        if self._causal:
            return {"causal": True, "window_left": -1 if self._window is None else self._window - 1}
        masks = [
            self._visible(slice(begin, end), slots).ravel()
            for begin, end, slots in zip(self._bounds[:-1], self._bounds[1:], self._slots, strict=True)
        ]
        return {"custom_mask": torch.from_numpy(np.concatenate(masks)).to(self._device)}

    def blind(self) -> torch.Tensor | None:
        """``[N]`` indices of tokens that see nothing, whose result is zero."""
        found = np.flatnonzero((self._low >= self._base) & (self._extra < 0).all(1))
        return self._tensor(found, torch.int64) if len(found) else None

    def _visible(self, tokens: slice, slots: int) -> np.ndarray:
        at = np.arange(slots)
        seen = (at >= self._low[tokens, None]) & (at < self._base[tokens, None])
        return seen | (self._extra[tokens, :, None] == at).any(1)

    def _tensor(self, array: np.ndarray, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device, dtype)
