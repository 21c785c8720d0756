"""What a method drafts for a history it sees for the first time: the reference of proposers with state."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import torch
from specdec_kernels.attention import AttentionMetadata

from ..api.assemble import LoadedTarget
from ..api.params import SamplingParams
from ..contract import (
    EMBED,
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
from ..engine.continuing import behind
from ..engine.feed import make_drafts
from ..models import Decoder
from ..plugins import PluginManager, default_manager, prepare
from ..sampling import SampleRow, SamplingBatch, TokenHistory, law, laws_in_order, rank
from ..sampling.laws import whole_logits
from .dense import DenseRow, dense_forward


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

    @property
    def width(self) -> int:
        return self._step.budget

    def rows(self, name: str, place: Place) -> Any:
        if name == "history" and place is Place.DEVICE:
            return torch.tensor([list(self._step.history)], dtype=torch.int32, device=self._model.device)
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

    def sample(self, logits: Any, rows: Any, positions: Any, k: int, vocabulary: Any) -> tuple[Any, Any]:
        logits = whole_logits(logits, vocabulary, self._model.config.vocab_size)
        return rank(logits, self._batch(logits, positions), k)

    def probs(self, logits: Any, rows: Any, positions: Any, ids: Any, vocabulary: Any) -> Any:
        logits = whole_logits(logits, vocabulary, self._model.config.vocab_size)
        return laws_in_order(law(logits, self._batch(logits, positions)), torch.as_tensor(ids))

    def _batch(self, logits: torch.Tensor, positions: Any) -> SamplingBatch:
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
        return SamplingBatch.build(draws, logits.shape[-1], logits.device)

    def drafts(self, needs: Needs) -> Drafts:
        return make_drafts(needs, 1, self._model.config.vocab_size, self._model.device)

    def limit(self, name: str, value: Any, bound: int, place: Place) -> Any:
        if place is Place.HOST:
            return np.minimum(value.cpu().numpy() if isinstance(value, torch.Tensor) else value, bound)
        return self._tensor(value).clamp(max=bound)

    def behind(self, name: str, drafts: Sequence[Drafts], place: Place) -> Any:
        return behind(self, name, drafts, place)

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
