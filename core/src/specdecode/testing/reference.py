"""Slow and plain references: decoding without cache or batch, and drafting without state.

Both recompute a whole sequence in one dense forward of one row, so nothing that paging, batching,
chunking, prefix hits or preemption could get wrong is in them.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from specdec_kernels.attention import AttentionMetadata

from ..api.assemble import LoadedTarget
from ..api.params import SamplingParams
from ..contract import (
    EMBED,
    FINAL,
    LM_HEAD,
    Drafts,
    KVSpec,
    Needs,
    Place,
    RequestInfo,
    Resources,
    StepView,
    Tap,
    TargetInfo,
)
from ..engine.feed import make_drafts
from ..models import Decoder
from ..plugins import PluginManager, default_manager, prepare
from ..sampling import SampleRow, SamplingBatch, TokenHistory, draw, rank


# -- one dense row ---------------------------------------------------------------------------------
class DenseRow:
    """KV layers of one row in one block: logical slot ``j`` is slot ``j``."""

    def __init__(self, shapes: Sequence[tuple[int, int, int]], slots: int, like: Decoder) -> None:
        """``shapes``: heads, k_dim and v_dim of each layer."""

        def zeros(heads: int, dim: int) -> torch.Tensor:
            return torch.zeros(1, slots, heads, dim, dtype=like.dtype, device=like.device)

        self.caches = [(zeros(heads, k_dim), zeros(heads, v_dim)) for heads, k_dim, v_dim in shapes]
        self._table = torch.zeros(1, 1, dtype=torch.int64, device=like.device)
        self._slots = slots

    def clear(self) -> None:
        """Forget all entries."""
        for cache in self.caches:
            for tensor in cache:
                tensor.zero_()

    def metadata(
        self, slots: torch.Tensor, base: torch.Tensor, extra: torch.Tensor | None = None, first: int = 0
    ) -> AttentionMetadata:
        """For tokens that write ``slots`` and see ``first..base-1`` and ``extra`` (``[T]``, ``[T, E]``)."""
        return AttentionMetadata(
            rows=torch.zeros_like(slots),
            positions=slots,
            write_slots=slots,
            base=base,
            block_table=self._table,
            block_size=self._slots,
            first=first,
            extra=extra,
        )


@torch.inference_mode()
def dense_forward(
    model: Decoder, ids: Sequence[int], taps: Sequence[Tap] = ()
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """The whole sequence in one forward: ``[T, H]`` after the final norm, and ``[T, H]`` for each tap."""
    config = model.config
    shape = (config.num_kv_heads, config.head_dim, config.head_dim)
    row = DenseRow([shape] * config.num_layers, len(ids), model)
    positions = torch.arange(len(ids), device=model.device)
    boundaries = tuple(tap.boundary for tap in taps if isinstance(tap.boundary, int))
    tokens = torch.tensor(ids, dtype=torch.int64, device=model.device)
    hidden, tapped = model(tokens, positions, row.metadata(positions, positions + 1), row.caches, boundaries)
    found = dict(zip(boundaries, tapped, strict=True))
    return hidden, tuple(hidden if tap == FINAL else found[tap.boundary] for tap in taps)  # type: ignore[index]


# -- decoding --------------------------------------------------------------------------------------
@torch.inference_mode()
def reference_decode(
    model: Decoder,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    *,
    seed: int = 0,
    index: int = 0,
    eos_ids: Collection[int] = (),
    max_model_len: int | None = None,
) -> list[int]:
    """The output ids of a prompt, each drawn from a forward over everything before it.

    Args:
        seed: keys the noise of a sampled request; what ``resolve_seed`` makes of ``params.seed``.
        index: which completion of the prompt.
        eos_ids: end the output unless ``params.ignore_eos``.
        max_model_len: most tokens, prompt included; None: the model's.

    Raises:
        ValueError: ``params`` has stop strings, which want a tokenizer.
    """
    if params.stop:
        raise ValueError(f"reference_decode knows no text, so no stop strings; got {params.stop!r}")
    stops = () if params.ignore_eos else tuple(eos_ids)
    limit = max_model_len or model.max_model_len
    if params.max_tokens is not None:
        limit = min(limit, len(prompt_ids) + params.max_tokens)
    ids, history = list(prompt_ids), TokenHistory(prompt_ids)
    while len(ids) < limit:
        hidden, _ = dense_forward(model, ids)
        row = SampleRow(
            params=params,
            seed=seed,
            index=index,
            position=len(ids),
            num_output=len(ids) - len(prompt_ids),
            history=history,
            stop_ids=stops,
        )
        batch = SamplingBatch.build([row], model.config.vocab_size, model.device)
        token = int(draw(model.compute_logits(hidden[-1:]), batch))
        ids.append(token)
        history.extend([token])
        enough = len(ids) - len(prompt_ids) >= params.min_tokens
        if enough and (token in stops or token in params.stop_token_ids):
            break
    return ids[len(prompt_ids) :]


# -- drafting --------------------------------------------------------------------------------------
@attrs.frozen(kw_only=True)
class DenseStep:
    """One row whose whole history is fed in one go, and what it may draft."""

    history: Sequence[int]
    prompt_len: int
    params: SamplingParams
    budget: int
    room: int
    seed: int = 0
    index: int = 0
    eos: tuple[int, ...] = ()  #: ids that end the request, beside its ``stop_token_ids``; for ``min_tokens``


class DenseSource:
    """Implements :class:`~specdecode.contract.StepSource` for a :class:`DenseStep`."""

    def __init__(
        self,
        step: DenseStep,
        request_id: str,
        needs: Needs,
        rows: Sequence[DenseRow],
        taps: dict[Tap, torch.Tensor],
        model: Decoder,
    ) -> None:
        self._step = step
        self._needs = needs
        self._kv_rows = rows
        self._taps = taps
        self._model = model
        # Draft layers without taps have an entry 0; those with taps begin at 1.
        self._start = 0 if not needs.taps or any(spec.first == 0 for spec in needs.kv) else 1
        self._values = self._arrays(request_id)

    def _arrays(self, request_id: str) -> dict[str, Any]:
        step, start = self._step, self._start
        length = len(step.history)
        return {
            "request_ids": [request_id],
            "params": [step.params],
            "history": [list(step.history)],
            "allowed": None,
            "committed_len": np.array([length]),
            "last_token": np.array([step.history[-1]]),
            "budget": np.array([step.budget]),
            "room": np.array([step.room]),
            "ids": np.array(step.history[start:], np.int64),
            "positions": np.arange(start, length),
            "rows": np.zeros(length - start, np.int64),
            "last": np.array([length - start - 1]),
        }

    def rows(self, name: str, place: Place) -> Any:
        value = self._values[name]
        if place is Place.HOST or not isinstance(value, np.ndarray):
            return value
        return torch.from_numpy(value).to(self._model.device)

    def own_len(self, kv: range, place: Place) -> Any:
        return np.zeros(1, np.int64) if place is Place.HOST else self._tensor([0])

    def taps(self, taps: tuple[Tap, ...]) -> tuple[Any, ...]:
        return tuple(self._taps[tap][self._start :] for tap in taps)

    def ctx(self, kv: int, rows: Any, slots: Any, base: Any, extra: Any) -> AttentionMetadata:
        spec: KVSpec = self._needs.kv[kv]
        more = None if extra is None else self._tensor(extra)
        return self._kv_rows[kv].metadata(self._tensor(slots), self._tensor(base), more, spec.first)

    def sample(self, logits: Any, rows: Any, positions: Any, k: int) -> tuple[Any, Any]:
        step, history = self._step, TokenHistory(self._step.history[: self._step.prompt_len])
        history.extend(step.history[step.prompt_len :])
        draws = [
            SampleRow(
                params=step.params,
                seed=step.seed,
                index=step.index,
                position=position,
                num_output=position - step.prompt_len,
                history=history,
                stop_ids=step.eos,
            )
            for position in self._tensor(positions).tolist()
        ]
        return rank(logits, SamplingBatch.build(draws, logits.shape[-1], logits.device), k)

    def drafts(self, needs: Needs) -> Drafts:
        return make_drafts(needs, 1, self._model.config.vocab_size, self._model.device)

    def limit(self, name: str, value: Any, bound: int, place: Place) -> Any:
        if place is Place.HOST:
            return np.minimum(value.cpu().numpy() if isinstance(value, torch.Tensor) else value, bound)
        return self._tensor(value).clamp(max=bound)

    def _tensor(self, value: Any) -> torch.Tensor:
        return torch.as_tensor(value, dtype=torch.int64, device=self._model.device)


class StatelessDrafter:
    """What a method drafts for a history it sees for the first time, fed densely with true hidden states."""

    def __init__(
        self,
        model: Decoder,
        target: TargetInfo,
        speculative_config: Any,
        *,
        manager: PluginManager | None = None,
    ) -> None:
        prepared = prepare(manager or default_manager(), speculative_config, target)
        self.needs = prepared.needs
        self._model = model
        self._proposer = prepared.build(max_num_seqs=1)
        parts = {EMBED: model.embed_tokens, LM_HEAD: model.compute_logits}
        modules = {name: parts[name] for name in self.needs.modules}
        self._proposer.load(LoadedTarget(target, model.device, model.dtype, modules))
        slots = target.max_model_len + 1 + self.needs.reserve
        self._rows = [
            DenseRow([(spec.heads, spec.k_dim, spec.v_dim)] * spec.layers, slots, model)
            for spec in self.needs.kv
        ]
        self._proposer.bind(
            Resources(
                kv=[row.caches for row in self._rows],
                block_size=slots,
                max_num_seqs=1,
                max_model_len=target.max_model_len,
            )
        )
        self._names = (f"stateless-{number}" for number in itertools.count())

    @torch.inference_mode()
    def drafts(self, step: DenseStep) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Ids and parents, at most ``step.budget`` of them."""
        name = next(self._names)
        for row in self._rows:
            row.clear()
        request = RequestInfo(
            id=name,
            namespace="",
            token_ids=tuple(step.history),
            prompt_len=step.prompt_len,
            params=step.params,
            resumed=False,
        )
        source = DenseSource(
            step, name, self.needs, self._rows, self._shifted_taps(step.history), self._model
        )
        out = source.drafts(self.needs)
        self._proposer.on_add(request)
        self._proposer.propose(StepView(self.needs, source), out)
        self._proposer.on_finish(name, "stop")
        count = max(0, min(int(out.lens[0]), step.budget))
        return tuple(out.ids[0, :count].tolist()), tuple(out.parents[0, :count].tolist())

    def _shifted_taps(self, history: Sequence[int]) -> dict[Tap, torch.Tensor]:
        """For each position the hidden states of the one before, zeros for position 0."""
        if not self.needs.taps:
            return {}
        _, tapped = dense_forward(self._model, history[:-1], self.needs.taps)
        zero = torch.zeros(
            1, self._model.config.hidden_size, dtype=self._model.dtype, device=self._model.device
        )
        return {tap: torch.cat((zero, hidden)) for tap, hidden in zip(self.needs.taps, tapped, strict=True)}
