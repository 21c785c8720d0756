"""A GPU's time by stage, read from a trace: which kernels ran, who launched them, and when nothing ran.

A kernel belongs to the stage whose range its launch lies in. Those of a captured step are launched
together and told apart by their order: inputs are prepared, the target runs, tokens are drawn and drafts
accepted, and what comes then drafts.
"""

from __future__ import annotations

import bisect
import importlib
import pkgutil
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from .stages import DRAFT, HOST, PREFILL, PREFIX, STEP, TARGET, VERIFY

IDLE = "idle"
_ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_LAUNCHES = frozenset({"cuda_runtime", "cuda_driver"})
#: Folders of the kernels that decide a step, and what the names of its first and last hold.
_DECIDING = ("sampling", "noise", "verification")
_FIRST, _LAST = "next_inputs", "accept"


@attrs.frozen(kw_only=True)
class Timeline:
    """Steps behind the last prompt: their number, and microseconds of the device by stage."""

    steps: int
    total: float  #: from the first kernel's start to the last one's end
    stages: Mapping[str, float]  #: target, verify, draft, host (nothing ran and the host computed) and idle


@attrs.frozen
class Span:
    """Microseconds of a trace's clock."""

    start: float
    end: float


@attrs.frozen
class Work:
    """One kernel or copy on the device."""

    span: Span
    name: str
    launch: int  #: correlation: equal for all that one call launched


def deciding_kernels() -> frozenset[str]:
    """Names of the kernels that draw, accept and prepare inputs, and of no others."""
    import specdec_kernels

    names: dict[bool, set[str]] = {True: set(), False: set()}
    for module in pkgutil.walk_packages(specdec_kernels.__path__, "specdec_kernels."):
        try:
            content = vars(importlib.import_module(module.name))
        except ImportError:  # without Triton there is nothing to find
            continue
        kernels = {value.fn.__name__ for value in content.values() if type(value).__name__ == "JITFunction"}
        names[module.name.split(".")[1] in _DECIDING] |= kernels
    return frozenset(names[True] - names[False])


def read_timeline(trace: Mapping[str, Any], deciding: Iterable[str], *, drafting: bool) -> Timeline | None:
    """What a trace of :mod:`torch.profiler`, with the ranges of :mod:`.stages`, says of decode steps.

    Args:
        trace: the object of its JSON file.
        deciding: see :func:`deciding_kernels`.
        drafting: whether anything drafts; else what comes last in a captured step decides it too.

    Returns:
        None if no kernel was recorded: there is no GPU, or its counters cannot be read.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    ranges = _ranges(events)
    prompts = max((span.end for span in ranges.get(PREFILL, ())), default=0.0)
    steps = [span for span in ranges.get(STEP, ()) if span.start >= prompts]
    calls = {
        event["args"]["correlation"]: float(event["ts"])
        for event in events
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }
    begin = min((span.start for span in steps), default=0.0)
    works = [work for work in _works(events) if calls.get(work.launch, -1.0) >= begin]
    if not works or not steps:
        return None
    return Timeline(
        steps=len(steps),
        total=max(work.span.end for work in works) - works[0].span.start,
        stages=_charge(
            list(zip(works, _stages_of(works, calls, ranges, frozenset(deciding), drafting), strict=True)),
            _blocked(events),
        ),
    )


def _span(event: Mapping[str, Any]) -> Span:
    return Span(float(event["ts"]), float(event["ts"]) + float(event["dur"]))


def _ranges(events: Sequence[Mapping[str, Any]]) -> dict[str, list[Span]]:
    """Our ranges on the host, by name, in order."""
    found: dict[str, list[Span]] = {}
    for event in events:
        name = str(event["name"])
        if event.get("cat") == "user_annotation" and name.startswith(PREFIX):
            found.setdefault(name.removeprefix(PREFIX), []).append(_span(event))
    return {name: sorted(spans, key=lambda span: span.start) for name, spans in found.items()}


def _works(events: Sequence[Mapping[str, Any]]) -> list[Work]:
    """All work on the device, in order of its start."""
    found = [
        Work(_span(event), str(event["name"]), event.get("args", {}).get("correlation", -1))
        for event in events
        if event.get("cat") in _ON_DEVICE
    ]
    return sorted(found, key=lambda work: work.span.start)


def _blocked(events: Sequence[Mapping[str, Any]]) -> list[Span]:
    """When the host waited for the device."""
    return sorted(
        (_span(e) for e in events if e.get("cat") in _LAUNCHES and "Synchronize" in e["name"]),
        key=lambda span: span.start,
    )


# -- which stage --------------------------------------------------------------------------------------
def _stages_of(
    works: Sequence[Work],
    calls: Mapping[int, float],
    ranges: Mapping[str, Sequence[Span]],
    deciding: frozenset[str],
    drafting: bool,
) -> list[str]:
    """The stage of each of ``works``."""
    host = _HostStages(ranges)
    together: dict[int, list[int]] = {}
    for index, work in enumerate(works):
        together.setdefault(work.launch, []).append(index)
    found = [HOST] * len(works)
    for launch, indices in together.items():
        stage = host.at(calls[launch])
        names = [works[index].name for index in indices]
        stages = [stage] * len(indices)
        if len(indices) > 1 and stage == TARGET:  # a captured step
            stages = _in_order(names, deciding, drafting)
        for index, own in zip(indices, stages, strict=True):
            found[index] = own
    return found


class _HostStages:
    """The innermost stage that the host was in at any moment; ranges lie beside or inside each other."""

    def __init__(self, ranges: Mapping[str, Sequence[Span]]) -> None:
        spans = [(span, stage) for stage in (TARGET, VERIFY, DRAFT) for span in ranges.get(stage, ())]
        # At the same moment ends come first, and of those that begin together the outer one.
        edges = sorted(
            edge
            for span, stage in spans
            if span.end > span.start
            for edge in ((span.start, True, -span.end, stage), (span.end, False, 0.0, stage))
        )
        open_: list[str] = []
        self._moments: list[float] = []
        self._names: list[str] = []
        for moment, begins, _, stage in edges:
            if begins:
                open_.append(stage)
            else:
                open_.pop()
            self._moments.append(moment)
            self._names.append(open_[-1] if open_ else HOST)

    def at(self, moment: float) -> str:
        place = bisect.bisect_right(self._moments, moment) - 1
        return self._names[place] if place >= 0 else HOST


def _in_order(names: Sequence[str], deciding: frozenset[str], drafting: bool) -> list[str]:
    """Stages of a captured step's kernels."""
    first = next((i for i, name in enumerate(names) if _FIRST in name), -1)
    drawing = next((i for i, name in enumerate(names) if i > first and name in deciding), len(names))
    last = next((i for i, name in enumerate(names) if i >= drawing and _LAST in name), len(names))
    behind = DRAFT if drafting else VERIFY
    return [
        VERIFY if i <= first or drawing <= i <= last else TARGET if i < drawing else behind
        for i in range(len(names))
    ]


# -- how long -----------------------------------------------------------------------------------------
def _charge(works: Sequence[tuple[Work, str]], blocked: Sequence[Span]) -> dict[str, float]:
    """Every microsecond from the first start to the last end, charged once.

    A pause between two kernels of one launch is the next one's: the device goes on by itself. Any other
    pause is idle time where the host waited, and else the host's.
    """
    totals = dict.fromkeys((TARGET, VERIFY, DRAFT, HOST, IDLE), 0.0)
    now, launch = works[0][0].span.start, None
    for work, stage in works:
        start, end = work.span.start, work.span.end
        if start > now:
            if work.launch == launch:
                totals[stage] += start - now
            else:
                waited = _overlap(Span(now, start), blocked)
                totals[IDLE] += waited
                totals[HOST] += start - now - waited
        totals[stage] += max(0.0, end - max(start, now))
        now, launch = max(now, end), work.launch
    return totals


def _overlap(pause: Span, blocked: Sequence[Span]) -> float:
    """Microseconds of ``pause`` in which the host was blocked."""
    place = max(0, bisect.bisect_right(blocked, pause.start, key=lambda span: span.start) - 1)
    total = 0.0
    for span in blocked[place:]:
        if span.start >= pause.end:
            break
        total += max(0.0, min(span.end, pause.end) - max(span.start, pause.start))
    return total
