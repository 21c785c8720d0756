"""Core's side of a view and of the target, watched: what is read, what is written, and poison where asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import attrs
import numpy as np
import torch

from ...contract import Drafts, Needs, Place, Proposer, StepSource, StepView, Tap, Tokens
from ...engine.static_feed import StaticFeed
from ..scripted.wrapping import WrappingProposer

#: Attribute of the view -> whether Needs declare it; all others are always shown.
_DECLARED = {
    "last_token": lambda needs: needs.tokens >= Tokens.NEW,
    "history": lambda needs: needs.tokens >= Tokens.HISTORY,
    "ids": lambda needs: needs.tokens >= Tokens.NEW or needs.kv,
}


@attrs.define(eq=False)
class WatchedSource:
    """Core's :class:`~specdecode.contract.StepSource`, with what it shows written down.

    With ``poison`` it gives garbage of the right form for what ``needs`` do not declare: a view
    refuses to show that, but a proposer can reach around it.
    """

    _source: StepSource
    _needs: Needs
    _reads: set[str]
    _poison: bool = attrs.field(kw_only=True)
    _shown: dict[str, tuple[Any, Any]] = attrs.field(factory=dict, init=False)

    def rows(self, name: str, place: Place) -> Any:
        self._reads.add(name)
        value = self._source.rows(name, place)
        if self._poison and name in _DECLARED and not _DECLARED[name](self._needs):
            return _garbage(value)
        if isinstance(value, (np.ndarray, torch.Tensor)):
            self._shown.setdefault(f"{name} ({place.value})", (value, _copy(value)))
        return value

    def own_len(self, kv: range, place: Place) -> Any:
        self._reads.add("kv")
        return self._source.own_len(kv, place)

    def taps(self, taps: tuple[Tap, ...]) -> tuple[Any, ...]:
        self._reads.add("taps")
        return self._source.taps(taps)

    def ctx(self, kv: int, rows: Any, slots: Any, base: Any, extra: Any) -> Any:
        self._reads.add("kv")
        return self._source.ctx(kv, rows, slots, base, extra)

    def behind(self, name: str, drafts: Sequence[Drafts], place: Place) -> Any:
        self._reads.add(name)
        return self._source.behind(name, drafts, place)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)  # what shows nothing: sample, probs, drafts, limit

    def written(self) -> list[str]:
        """What was shown and is no longer what it was."""
        return [name for name, (value, copy) in self._shown.items() if bool((value != copy).any())]


class AroundStaticSteps(WrappingProposer):
    """Passes every call on, those of static steps inside a context of their own."""

    def __init__(self, inner: Proposer, around: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__(inner)
        self._around = around

    def propose(self, step: StepView, out: Drafts) -> None:
        static = isinstance(step._source, StaticFeed)
        with self._around() if static else nullcontext():
            self.inner.propose(step, out)


class WatchedModules(Mapping[str, Any]):
    """The borrowed parts of the target; which of them are taken is written into ``reads``."""

    def __init__(self, modules: Mapping[str, Any], reads: set[str]) -> None:
        self._modules, self._reads = modules, reads

    def __getitem__(self, name: str) -> Any:
        self._reads.add(f"modules[{name}]")
        return self._modules[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)


def _copy(value: np.ndarray | torch.Tensor) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value.copy()


def _garbage(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.full_like(value, 1)
    if isinstance(value, np.ndarray):
        return np.full_like(value, 1)
    return [[1] * len(row) for row in value]
