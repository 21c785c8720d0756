"""The rows of one step and what each asks of the sampler, as tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np
import torch

from specdecode.api.params import SamplingParams

from .history import TokenHistory, needs_history
from .mask import TokenMask
from .streams import Stream


@attrs.frozen(kw_only=True)
class SampleRow:
    """One token to draw: whose, and after what.

    ``num_output`` and ``position`` are the row's own: on a path of drafts they count the drafts
    before it.
    """

    params: SamplingParams
    seed: int  #: 64 bits as a signed integer, from :func:`resolve_seed`
    index: int  #: which completion of the prompt
    position: int  #: index of the token drawn, prompt included
    num_output: int  #: output tokens before it
    history: TokenHistory | None = None  #: needed if :func:`needs_history`
    path: tuple[int, ...] = ()  #: drafts before it that ``history`` does not hold
    stop_ids: tuple[int, ...] = ()  #: end the output; excluded while it is below ``min_tokens``
    banned: tuple[int, ...] = ()  #: would complete a bad word
    mask: TokenMask | None = None  #: what the request's grammar allows
    stream: int = Stream.TARGET  #: which of the key's independent noises: :meth:`Stream.keyed`
    #: ``[V]`` float32 to ``[V]``: the request's logits processors, given the output before the token
    process: Callable[[torch.Tensor], torch.Tensor] | None = None


@attrs.frozen
class Entries:
    """Single logits ``rows[i], ids[i]``, ``[N]`` int64 each."""

    rows: torch.Tensor
    ids: torch.Tensor


@attrs.frozen
class ValuedEntries(Entries):
    """Single logits and a value for each, ``[N]`` float32."""

    values: torch.Tensor


@attrs.frozen
class Allowed:
    """``rows`` ``[N]`` that keep nothing but their ``entries``."""

    rows: torch.Tensor
    entries: Entries


@attrs.frozen
class MaskedRows:
    """What a grammar allows: ``rows`` ``[N]`` (None: all, in order), ``bits`` ``[N, ceil(V / 8)]`` uint8."""

    rows: torch.Tensor | None
    bits: torch.Tensor


@attrs.frozen
class RowValues:
    """A parameter of some rows: ``rows`` ``[N]`` (None: of all, in order) and ``values`` ``[N]``."""

    rows: torch.Tensor | None
    values: torch.Tensor
    most: int = 0  #: the largest value, where it is a count


@attrs.frozen
class Penalties:
    """The tokens each row's text holds, and the three penalties ``[R]`` float32."""

    entries: ValuedEntries
    presence: torch.Tensor
    frequency: torch.Tensor
    repetition: torch.Tensor


@attrs.frozen
class NoiseKeys:
    """Who draws with noise: ``rows`` ``[N]`` (None: all, in order), and the key of each, ``[N]``."""

    rows: torch.Tensor | None
    seed: torch.Tensor
    index: torch.Tensor
    position: torch.Tensor
    stream: torch.Tensor


@attrs.frozen(kw_only=True, eq=False)
class SamplingBatch:
    """What the sampler does to ``[num_rows, vocab_size]`` logits; None where no row asks for it."""

    num_rows: int
    vocab_size: int
    masked: MaskedRows | None = None
    allowed: Allowed | None = None
    banned: Entries | None = None
    bias: ValuedEntries | None = None
    processed: tuple[tuple[int, Callable[[torch.Tensor], torch.Tensor]], ...] = ()  #: row, its processors
    penalties: Penalties | None = None
    temperature: torch.Tensor | None = None  #: ``[R]`` float32, 1 for greedy rows
    min_p: RowValues | None = None
    top_k: RowValues | None = None
    top_p: RowValues | None = None
    noise: NoiseKeys | None = None  #: None: every row is greedy

    @property
    def leaves_logits(self) -> bool:
        """Whether no transform applies to any row."""
        parts = (self.masked, self.allowed, self.banned, self.bias, self.penalties, self.temperature)
        return not self.processed and all(
            part is None for part in (*parts, self.min_p, self.top_k, self.top_p)
        )

    @classmethod
    def build(
        cls, rows: Sequence[SampleRow], vocab_size: int, device: torch.device | str = "cpu"
    ) -> SamplingBatch:
        """Collect what ``rows`` ask for.

        Raises:
            ValueError: a row with penalties came without its history.
        """
        builder = _Builder(rows, vocab_size, torch.device(device))
        sampled = [r for r, row in enumerate(rows) if not row.params.greedy]
        return cls(
            num_rows=len(rows),
            vocab_size=vocab_size,
            masked=builder.masked(),
            **builder.masks(),
            bias=builder.bias(),
            processed=tuple((r, row.process) for r, row in enumerate(rows) if row.process is not None),
            penalties=builder.penalties(),
            **(builder.truncation(sampled) if sampled else {}),
        )


class _Builder:
    def __init__(self, rows: Sequence[SampleRow], vocab_size: int, device: torch.device) -> None:
        self._rows = rows
        self._vocab_size = vocab_size
        self._device = device

    def masked(self) -> MaskedRows | None:
        masks = [(r, row.mask.bits) for r, row in enumerate(self._rows) if row.mask is not None]
        if not masks:
            return None
        rows, bits = zip(*masks, strict=True)
        return MaskedRows(self._subset(rows), self._tensor(np.stack(bits), np.uint8))

    def masks(self) -> dict[str, Any]:
        allowed_rows: list[int] = []
        allowed: list[tuple[int, int]] = []
        banned: list[tuple[int, int]] = []
        for r, row in enumerate(self._rows):
            params = row.params
            banned += ((r, token) for token in row.banned)
            keep = params.allowed_token_ids
            stops = {*row.stop_ids, *params.stop_token_ids} if row.num_output < params.min_tokens else set()
            if keep is not None:
                allowed_rows.append(r)
                allowed += ((r, token) for token in keep)
            if not _only(stops, keep, row.mask):  # else one of them must come
                banned += ((r, token) for token in sorted(stops))
        return {
            "allowed": Allowed(self._tensor(allowed_rows), self._entries(allowed)) if allowed else None,
            "banned": self._entries(banned) if banned else None,
        }

    def bias(self) -> ValuedEntries | None:
        entries = [
            (r, token, value)
            for r, row in enumerate(self._rows)
            if row.params.logit_bias
            for token, value in row.params.logit_bias.items()
        ]
        if not entries:
            return None
        rows, ids, values = zip(*entries, strict=True)
        return ValuedEntries(self._tensor(rows), self._tensor(ids), self._tensor(values, np.float32))

    def penalties(self) -> Penalties | None:
        rows, ids, counts = [], [], []
        for r, row in enumerate(self._rows):
            if not needs_history(row.params):
                continue
            if row.history is None:
                raise ValueError(f"row {r} has penalties and needs its TokenHistory, got None")
            row_ids, row_counts = row.history.counts(row.path)
            rows.append(np.full(len(row_ids), r))
            ids.append(row_ids)
            counts.append(row_counts)
        if not rows:
            return None
        entries = ValuedEntries(
            self._tensor(np.concatenate(rows)),
            self._tensor(np.concatenate(ids)),
            self._tensor(np.concatenate(counts), np.float32),
        )
        return Penalties(
            entries,
            self._column(lambda p: p.presence_penalty),
            self._column(lambda p: p.frequency_penalty),
            self._column(lambda p: p.repetition_penalty),
        )

    def truncation(self, sampled: Sequence[int]) -> dict[str, Any]:
        """What only rows with noise have: temperature, min_p, top_k, top_p, the noise itself."""
        rows, size = self._rows, self._vocab_size
        keys = [(rows[r].seed, rows[r].index, rows[r].position, rows[r].stream) for r in sampled]
        return {
            "temperature": self._column(lambda p: 1.0 if p.greedy else p.temperature),
            "min_p": self._values(sampled, lambda p: p.min_p, lambda v: v > 0),
            "top_k": self._values(sampled, lambda p: p.top_k, lambda v: 0 < v < size, np.int64),
            "top_p": self._values(sampled, lambda p: p.top_p, lambda v: v < 1),
            "noise": NoiseKeys(self._subset(sampled), *self._tensor(keys).T),
        }

    def _values(
        self,
        sampled: Sequence[int],
        read: Callable[[SamplingParams], Any],
        on: Callable[[Any], bool],
        dtype: Any = np.float32,
    ) -> RowValues | None:
        chosen = [(r, value) for r in sampled if on(value := read(self._rows[r].params))]
        if not chosen:
            return None
        rows, values = zip(*chosen, strict=True)
        return RowValues(
            self._subset(rows), self._tensor(values, dtype), max(values) if dtype is np.int64 else 0
        )

    def _column(self, read: Callable[[SamplingParams], float]) -> torch.Tensor:
        return self._tensor([read(row.params) for row in self._rows], np.float32)

    def _entries(self, pairs: Sequence[tuple[int, int]]) -> Entries:
        rows, ids = zip(*pairs, strict=True)
        return Entries(self._tensor(rows), self._tensor(ids))

    def _subset(self, rows: Sequence[int]) -> torch.Tensor | None:
        return None if len(rows) == len(self._rows) else self._tensor(rows)

    def _tensor(self, values: Any, dtype: Any = np.int64) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, dtype=dtype)).to(self._device, non_blocking=True)


def _only(stops: set[int], keep: Sequence[int] | None, mask: TokenMask | None) -> bool:
    """Whether ``stops`` are all that allowed ids and grammar leave: banning them would leave nothing."""
    if not stops:
        return False
    if keep is not None:
        return stops.issuperset(token for token in keep if mask is None or token in mask)
    return mask is not None and not mask.without(stops)
