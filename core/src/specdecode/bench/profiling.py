"""Where the time of a decode step goes: on a GPU by its kernels, on a CPU by the clock; and a trace of it."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from .stages import DRAFT, HOST, TARGET, VERIFY, Stages, StepTime, watched
from .timeline import IDLE, deciding_kernels, read_timeline

if TYPE_CHECKING:
    from rich.table import Table

#: Most tokens of a profiled output: every kernel of every step goes into the trace.
PROFILED_TOKENS = 48
STAGES = (TARGET, VERIFY, DRAFT, HOST, IDLE)


@attrs.frozen(kw_only=True)
class StepProfile:
    """One engine's mean decode step. The milliseconds of the stages add up to it.

    On a GPU a stage's are those in which its kernels ran, and in the rest none did: the host's while it
    computed, idle ones while it waited as well. On a CPU there is no such rest, and idle is None.
    """

    method: str
    batch_size: int
    steps: int  #: decode steps measured: those with prompt tokens, and all before them, are left out
    step_ms: float
    target_ms: float
    verify_ms: float
    draft_ms: float
    host_ms: float
    idle_ms: float | None
    trace: str  #: file for Perfetto or chrome://tracing


def profile(
    llm: Any, method: str, prompts: Sequence[Sequence[int]], params: Any, folder: Path
) -> StepProfile:
    """Generate once more, watched, and write the trace to ``folder``.

    Args:
        llm: a :class:`~specdecode.LLM` that is warm and idle.
        method: what to call it.
        prompts: token ids; all are run at a time.
        params: SamplingParams; at most :data:`PROFILED_TOKENS` tokens of each output are made.

    Raises:
        OSError: the trace cannot be written.
        ValueError: there was no step without prompt tokens to measure.
    """
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    params = params.clone(max_tokens=min(params.max_tokens or PROFILED_TOKENS, PROFILED_TOKENS), min_tokens=0)
    given = [{"prompt_token_ids": list(ids)} for ids in prompts]
    on_gpu = llm.llm_engine.target.device.startswith("cuda")
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    stages = Stages()
    with record(activities=activities) as recording, watched(llm.llm_engine.core, stages):
        llm.generate(given, params, use_tqdm=False)
    path = folder / f"{method}-{len(given)}.json.gz"
    recording.export_chrome_trace(str(path))
    common = {"method": method, "batch_size": len(given), "trace": str(path)}
    if on_gpu:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            trace = json.load(file)
        drafting = llm.llm_engine.method is not None
        timeline = read_timeline(trace, deciding_kernels(), drafting=drafting)
        if timeline is not None:
            milliseconds = {name: us / timeline.steps / 1e3 for name, us in timeline.stages.items()}
            return _row(milliseconds, timeline.steps, timeline.total / timeline.steps / 1e3, common)
    return _by_clock(stages.steps, common)


def _by_clock(steps: Sequence[StepTime], common: dict[str, Any]) -> StepProfile:
    """From the wall-clock time of the steps behind the last prompt."""
    prompts = [index for index, step in enumerate(steps) if step.prefill]
    decoding = steps[prompts[-1] + 1 if prompts else 0 :]
    if not decoding:
        raise ValueError("no step without prompt tokens was made: profile longer outputs")
    count = len(decoding)
    milliseconds = {
        name: sum(step.seconds.get(name, 0.0) for step in decoding) / count * 1e3 for name in STAGES[:-1]
    }
    return _row(milliseconds, count, sum(milliseconds.values()), common)


def _row(milliseconds: dict[str, float], steps: int, step_ms: float, common: dict[str, Any]) -> StepProfile:
    named: dict[str, Any] = {f"{name}_ms": milliseconds.get(name) for name in STAGES}
    return StepProfile(steps=steps, step_ms=step_ms, **named, **common)


def profile_table(profiles: Sequence[StepProfile], title: str) -> Table:
    """For a terminal: a line an engine and batch size."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column("method", no_wrap=True)
    for column in ("batch", "steps", "ms/step", *STAGES):
        table.add_column(f" {column}", justify="right", no_wrap=True)
    for row in profiles:
        shares = [getattr(row, f"{name}_ms") for name in STAGES]
        table.add_row(
            row.method,
            str(row.batch_size),
            str(row.steps),
            f"{row.step_ms:.3f}",
            *("-" if ms is None else f" {ms:.3f} {ms / row.step_ms:4.0%}" for ms in shares),
        )
    return table
