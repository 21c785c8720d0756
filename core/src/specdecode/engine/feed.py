"""What a proposer is fed after a step, in numpy or on the device: core's side of the StepView."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from specdec_kernels.attention import AttentionMetadata

from ..contract import Drafts, KVSpec, Needs, Place, Probs, Tap
from ..runner.inputs import SlotMap
from ..sampling.laws import whole_logits
from .continuing import behind
from .plan import RowPlan
from .request import Request


class TokenView(Sequence[int]):
    """A request's committed ids, not to be written."""

    __slots__ = ("_ids",)

    def __init__(self, ids: list[int]) -> None:
        self._ids = ids

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: Any) -> Any:
        return self._ids[index]


@attrs.frozen(eq=False)
class FedRow:
    """One row of the feed: entries ``start..end-1`` of a request.

    ``hidden`` are the places in the forward's T tokens where the target's hidden states of this step's
    committed positions stand, the first of them position ``plan.start``.
    """

    plan: RowPlan
    start: int
    end: int
    budget: int
    room: int
    hidden: list[int]

    @property
    def request(self) -> Request:
        return self.plan.request


#: (logits ``[T, V]``, request and position of each, ...): what the view's ``sample`` and ``probs`` give.
Sampler = Callable[[torch.Tensor, list[Request], list[int], int], tuple[torch.Tensor, torch.Tensor]]
Laws = Callable[[torch.Tensor, list[Request], list[int], torch.Tensor], torch.Tensor]


class Feed:
    """Implements :class:`~specdecode.contract.StepSource` over the rows of one step."""

    def __init__(
        self,
        rows: Sequence[FedRow],
        *,
        kv: Sequence[KVSpec],
        slots: SlotMap | None,
        taps: dict[Tap, torch.Tensor],
        vocab_size: int,
        sampler: Sampler,
        laws: Laws,
        check: Callable[[torch.Tensor], None] | None,
        device: torch.device,
        max_slots: int | None = None,
    ) -> None:
        self._max_slots = max_slots
        self._fed = rows
        self._kv = kv
        self._slots = slots
        self._taps = taps
        self._vocab_size = vocab_size
        self._sampler = sampler
        self._laws = laws
        self._check = check
        self._device = device
        self._host: dict[str, Any] = {}
        self._on_device: dict[str, torch.Tensor] = {}

    # -- StepSource -----------------------------------------------------------------------------
    @property
    def width(self) -> int:
        return max((row.budget for row in self._fed), default=0)

    def rows(self, name: str, place: Place) -> Any:
        if name == "history" and place is Place.DEVICE:
            if name not in self._on_device:
                self._on_device[name] = _history(self._fed).to(self._device)
            return self._on_device[name]
        if name not in self._host:
            self._host[name] = _READ[name](self._fed)
        value = self._host[name]
        if place is Place.HOST or not isinstance(value, np.ndarray):
            return value
        if name not in self._on_device:
            self._on_device[name] = torch.from_numpy(value).to(self._device)
        return self._on_device[name]

    def own_len(self, kv: range, place: Place) -> Any:
        own = np.asarray([min(row.request.own[kv.start : kv.stop]) for row in self._fed], np.int64)
        return own if place is Place.HOST else torch.from_numpy(own).to(self._device)

    def taps(self, taps: tuple[Tap, ...]) -> tuple[Any, ...]:
        """Each ``[F, hidden]``: entry j gets the hidden of j - 1, and entry 0 zeros."""
        index = [
            row.hidden[entry - 1 - row.plan.start] if entry else -1
            for row in self._fed
            for entry in range(row.start, row.end)
        ]
        where = torch.tensor(index, device=self._device)
        if min(index, default=0) >= 0:
            return tuple(self._taps[tap][where] for tap in taps)
        first = (where < 0)[:, None]
        return tuple(self._taps[tap][where.clamp(min=0)].masked_fill(first, 0) for tap in taps)

    def ctx(self, kv: int, rows: Any, slots: Any, base: Any, extra: Any) -> AttentionMetadata:
        lengths = None
        if rows is self._on_device.get("rows") or rows is self._host.get("rows"):  # all that is fed
            lengths = tuple(row.end - row.start for row in self._fed)
        rows, slots, base = (self._tensor(value) for value in (rows, slots, base))
        assert self._slots is not None  # whoever has draft layers is given their slots
        floors = torch.tensor([row.request.draft_floor for row in self._fed], device=self._device)
        write = self._slots.physical(rows, slots, floors)
        extra = None if extra is None else self._tensor(extra)
        level = 0 if extra is None else (extra >= 0).sum(1)  # a node's ancestors and itself
        if self._check is not None:
            self._check(write)
        return AttentionMetadata(
            rows=rows,
            positions=base - 1 + level,
            write_slots=write,
            base=base,
            block_table=self._slots.device,
            block_size=self._slots.block_size,
            first=self._kv[kv].first,
            extra=extra,
            lengths=lengths,
            max_slots=self._max_slots,
        )

    def sample(self, logits: Any, rows: Any, positions: Any, k: int, vocabulary: Any) -> tuple[Any, Any]:
        requests = [self._fed[row].request for row in self._tensor(rows).tolist()]
        logits = whole_logits(logits, vocabulary, self._vocab_size)
        return self._sampler(logits, requests, self._tensor(positions).tolist(), k)

    def probs(self, logits: Any, rows: Any, positions: Any, ids: Any, vocabulary: Any) -> Any:
        requests = [self._fed[row].request for row in self._tensor(rows).tolist()]
        logits = whole_logits(logits, vocabulary, self._vocab_size)
        return self._laws(logits, requests, self._tensor(positions).tolist(), ids)

    def drafts(self, needs: Needs) -> Drafts:
        return make_drafts(needs, len(self._fed), self._vocab_size, self._device)

    def limit(self, name: str, value: Any, bound: int, place: Place) -> Any:
        if place is Place.HOST:
            value = value.cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
            return np.minimum(value, bound)
        return self._tensor(value).clamp(max=bound)

    def behind(self, name: str, drafts: Sequence[Drafts], place: Place) -> Any:
        return behind(self, name, drafts, place)

    def _tensor(self, value: Any) -> torch.Tensor:
        return torch.as_tensor(value, dtype=torch.int64, device=self._device)


def make_drafts(needs: Needs, num_rows: int, vocab_size: int, device: torch.device) -> Drafts:
    """Empty buffers for ``num_rows`` rows, in the form ``needs.place`` asks for."""
    shape = (num_rows, needs.width)
    probs = (*shape, vocab_size) if needs.probs is Probs.FULL else None
    if needs.place is Place.HOST:
        return Drafts(
            ids=np.zeros(shape, np.int64),
            lens=np.zeros(num_rows, np.int64),
            parents=np.tile(np.arange(-1, needs.width - 1), (num_rows, 1)),
            score=np.zeros(shape, np.float32),
            probs=None if probs is None else np.zeros(probs, np.float32),
        )
    return Drafts(
        ids=torch.zeros(shape, dtype=torch.int64, device=device),
        lens=torch.zeros(num_rows, dtype=torch.int64, device=device),
        parents=torch.arange(-1, needs.width - 1, device=device).repeat(num_rows, 1),
        score=torch.zeros(shape, dtype=torch.float32, device=device),
        probs=None if probs is None else torch.zeros(probs, dtype=torch.float32, device=device),
    )


def buffers_of(drafts: Drafts) -> dict[str, Any]:
    """Name -> buffer."""
    return {field.name: getattr(drafts, field.name) for field in attrs.fields(Drafts)}


def replaced(drafts: Drafts, buffers: Mapping[str, Any]) -> list[str]:
    """Names under which ``drafts`` no longer holds the ``buffers`` that it was given with."""
    return [name for name, buffer in buffers.items() if getattr(drafts, name) is not buffer]


def _int64(values: Iterable[int]) -> np.ndarray:
    return np.fromiter(values, np.int64)


def _history(rows: Sequence[FedRow]) -> torch.Tensor:
    """``[B, L]`` int32: the committed ids of each row, and zeros behind them."""
    longest = max(len(row.request.token_ids) for row in rows)
    ids = np.zeros((len(rows), longest), np.int32)
    for own, row in zip(ids, rows, strict=True):
        own[: len(row.request.token_ids)] = row.request.token_ids
    return torch.from_numpy(ids)


def _lengths(rows: Sequence[FedRow]) -> list[int]:
    return [row.end - row.start for row in rows]


def _allowed(rows: Sequence[FedRow]) -> np.ndarray | None:
    grammars = [row.request.grammar for row in rows]
    size = next((grammar.vocab_size for grammar in grammars if grammar is not None), None)
    if size is None:
        return None
    anything = np.ones(size, bool)
    masks = [grammar.mask if grammar is not None else None for grammar in grammars]
    return np.stack([anything if mask is None else mask.to_array(size) for mask in masks])


#: What a view shows of the fed rows, each made when it is first asked for.
_READ: dict[str, Callable[[Sequence[FedRow]], Any]] = {
    "request_ids": lambda rows: [row.request.id for row in rows],
    "params": lambda rows: [row.request.params for row in rows],
    "history": lambda rows: [TokenView(row.request.token_ids) for row in rows],
    "allowed": _allowed,
    "committed_len": lambda rows: _int64(len(row.request.token_ids) for row in rows),
    "last_token": lambda rows: _int64(row.request.token_ids[-1] for row in rows),
    "budget": lambda rows: _int64(row.budget for row in rows),
    "room": lambda rows: _int64(row.room for row in rows),
    "ids": lambda rows: _int64(token for row in rows for token in row.request.token_ids[row.start : row.end]),
    "positions": lambda rows: np.concatenate([np.arange(row.start, row.end) for row in rows]),
    "rows": lambda rows: np.repeat(np.arange(len(rows)), _lengths(rows)),
    "last": lambda rows: np.cumsum(_lengths(rows)) - 1,
}
