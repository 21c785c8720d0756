"""The Proposer: the one interface every draft method stands behind."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import attrs

from .drafts import Drafts
from .spec import TargetInfo
from .view import Commit, RequestInfo, StepView


class TargetHandle(Protocol):
    """The loaded target as a proposer may use it."""

    info: TargetInfo
    device: Any  #: torch.device
    dtype: Any  #: torch.dtype
    rank: int  #: among the ranks that share the target
    group: Any  #: of those ranks: for layers and models that are to be shared as the target is
    modules: Mapping[str, Any]  #: the parts named in ``Needs.modules``, as callables
    #: ``load_weights(path, names=None) -> iterator of (name, tensor)`` on the CPU: all, or those of ``names``
    load_weights: Callable[..., Any]


@attrs.frozen(kw_only=True)
class TargetUpdate:
    """The target's weights were replaced, in place: its modules compute with the new ones."""

    target: TargetHandle  #: that of ``load``
    path: str | None  #: directory of the new weights; None: they came as tensors
    #: ``load_weights(names=None) -> iterator of (name, tensor)``: the target's new weights by a checkpoint's
    #: names, on the CPU: all, or those of ``names``
    load_weights: Callable[..., Any]


class CostCurve(Protocol):
    """Seconds of a step of ``rows`` rows of ``tokens`` tokens each: the last committed one, then drafts."""

    def seconds(self, rows: float, tokens: float) -> float:
        """Of such a step; tokens may be those of a row on the average."""

    def best(self, rows: float, gains: Sequence[float]) -> int:
        """How many drafts a row make ``rows`` rows fastest, 0 to ``len(gains)``.

        ``gains``: for each draft the chance that it is accepted (of a chain: it and all before it), the one
        that is left out first at the end.
        """


@attrs.frozen(kw_only=True)
class Resources:
    """What core allocated for a proposer; addresses never change after ``bind``."""

    #: one entry for each ``Needs.kv``, in it one ``(key, value)`` pair for each layer:
    #: ``[num_blocks, block_size, heads, k_dim or v_dim]``
    kv: Sequence[Sequence[tuple[Any, Any]]]
    block_size: int
    max_num_seqs: int
    max_model_len: int
    #: ``costs([(rows, tokens), ...])`` measures the target's own step of ``rows`` rows of ``tokens`` tokens
    #: each, now, in a tenth of a second a point; None: there is nothing to measure, as in a test
    costs: Callable[[Sequence[tuple[int, int]]], CostCurve] | None = None


@attrs.frozen
class Bucket:
    """A static shape that a graph is captured for: ``rows`` rows fed with ``steps`` tokens each."""

    rows: int
    steps: int


class Proposer(abc.ABC):
    """A draft method at work. Only :meth:`propose` is abstract; the rest has a default.

    The order of calls in a step is fixed: ``on_preempt`` and ``on_add`` while the step is planned,
    then the target's forward and verification, ``on_commit``, ``propose``, ``on_finish``. With
    ``Place.DEVICE`` core may deliver ``on_commit`` one step late. A method that raises costs its
    drafts of that step, never a request.
    """

    #: Most drafts a row, of a method that finds out in ``bind``, by ``Resources.costs`` say, that it wants
    #: fewer than ``Needs.width``; None: as many
    most: int | None = None

    def load(self, target: TargetHandle) -> None:
        """Put weights on the device. Called once, before the KV cache is sized."""
        return None

    def bind(self, resources: Resources) -> None:
        """Keep references to the draft KV layers. Called once."""
        return None

    def warm(
        self, buckets: Sequence[Bucket], capture: Callable[[Callable[[], Any], Bucket], Callable[[], Any]]
    ) -> None:
        """Compile. Called once behind ``bind``, before core captures ``propose`` of a method with ``graphs``.

        ``capture(fn, bucket)`` returns what replays ``fn``, for graphs of a method's own; where there are
        none to record it returns ``fn``, and there are no ``buckets``.
        """
        return None

    def on_add(self, request: RequestInfo) -> None:
        """A request was admitted, or admitted again after a preemption."""
        return None

    def on_commit(self, commits: Sequence[Commit]) -> None:
        """A verification made tokens definite."""
        return None

    def on_preempt(self, request_id: str) -> None:
        """The request lost its KV: drop what derives from KV. ``on_add`` or ``on_finish`` follows."""
        return None

    def on_finish(self, request_id: str, reason: str) -> None:
        """The request ended: free all its state. Exactly once; no ``on_commit`` comes after it."""
        return None

    def on_target_updated(self, update: TargetUpdate) -> None:
        """The target has new weights: refresh what was made from the old ones, in place.

        Called between two steps, when no request has KV. What calls the target's modules computes with the
        new weights anyway; copies of its rows, or layers that its checkpoint holds, do not. Tensors keep
        their addresses: a graph may have been captured over them. What it raises leaves drafts that fit less.
        """
        return None

    @abc.abstractmethod
    def propose(self, step: StepView, out: Drafts) -> None:
        """Feed what is to be fed, then fill ``out`` within each row's budget and room.

        Called after every step that computed tokens, prefill chunks included.
        """

    def metrics(self) -> Mapping[str, float]:
        """Host floats; core prefixes the method's name."""
        return {}

    def close(self) -> None:
        """Free everything. May be called twice."""
        return None
