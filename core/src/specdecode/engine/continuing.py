"""What a proposer is shown that goes on from another's drafts: the same rows, some tokens further."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ..contract import Drafts, Place, StepSource


def behind(source: StepSource, name: str, drafts: Sequence[Drafts], place: Place) -> Any:
    """What ``source`` shows as ``name`` once each row's ``drafts`` stand behind its last token.

    Nothing waits for the device where ``place`` is ``DEVICE`` and the drafts are there.

    Args:
        name: ``committed_len``, ``room``, ``last_token``, ``history``, or ``drafted``: how many they are.
        drafts: chains, the later behind the earlier.
    """
    return _MOVED[name](source, [_placed(own, place) for own in drafts], place)


def _placed(drafts: Drafts, place: Place) -> tuple[Any, Any]:
    """Ids and lengths where they are wanted."""
    if place is Place.DEVICE:
        return torch.as_tensor(drafts.ids), torch.as_tensor(drafts.lens)
    return _host(drafts.ids), _host(drafts.lens)


def _host(value: Any) -> np.ndarray:
    return value.cpu().numpy() if isinstance(value, torch.Tensor) else value


_Chains = Sequence[tuple[Any, Any]]


def _drafted(source: StepSource, chains: _Chains, place: Place) -> Any:
    total = sum(lens for _, lens in chains)
    return _like(total, source.rows("committed_len", place), place)


def _committed(source: StepSource, chains: _Chains, place: Place) -> Any:
    return source.rows("committed_len", place) + _drafted(source, chains, place)


def _room(source: StepSource, chains: _Chains, place: Place) -> Any:
    return (source.rows("room", place) - _drafted(source, chains, place)).clip(min=0)


def _last(source: StepSource, chains: _Chains, place: Place) -> Any:
    last = source.rows("last_token", place)
    for ids, lens in chains:
        lens, at = _like(lens, last, place), _like(lens, last, place).clip(min=1) - 1
        if place is Place.DEVICE:
            own = _like(ids, last, place).gather(1, at[:, None])[:, 0]
            last = torch.where(lens > 0, own, last)
        else:
            last = np.where(lens > 0, ids[np.arange(len(lens)), at], last)
    return last


def _history(source: StepSource, chains: _Chains, place: Place) -> Any:
    history = source.rows("history", place)
    if place is Place.HOST:
        return [
            Continued(text, [int(token) for ids, lens in chains for token in ids[row, : lens[row]]])
            for row, text in enumerate(history)
        ]
    ends = source.rows("committed_len", place)
    width = sum(ids.shape[1] for ids, _ in chains)
    history = torch.cat((history, history.new_zeros(history.shape[0], width)), 1)
    for ids, lens in chains:
        ids, lens = _like(ids, ends, place), _like(lens, ends, place)
        places = torch.arange(ids.shape[1], device=ids.device)
        # What is no draft is written where nothing means anything: behind the end, and before the next chain.
        history = history.scatter(1, ends[:, None] + places, ids.to(history.dtype))
        ends = ends + lens
    return history


def _like(value: Any, other: Any, place: Place) -> Any:
    return value.to(other.device) if place is Place.DEVICE else value


_MOVED: dict[str, Callable[[StepSource, _Chains, Place], Any]] = {
    "committed_len": _committed,
    "drafted": _drafted,
    "history": _history,
    "last_token": _last,
    "room": _room,
}


class Continued(Sequence[int]):
    """A text and some tokens behind it; neither is copied, the text least of all."""

    __slots__ = ("_more", "_text")

    def __init__(self, text: Sequence[int], more: list[int]) -> None:
        self._text, self._more = text, more

    def __len__(self) -> int:
        return len(self._text) + len(self._more)

    def __getitem__(self, index: Any) -> Any:
        size = len(self._text)
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step == 1:
                more = self._more[max(start - size, 0) : max(stop - size, 0)]
                return [*self._text[start : min(stop, size)], *more]
            return [self[place] for place in range(start, stop, step)]
        place = range(len(self))[index]
        return self._text[place] if place < size else self._more[place - size]
