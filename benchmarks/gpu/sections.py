"""The sections of a run: what each measures, with which engine, and the table it prints."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import adaptive
import attrs
import beside
import decoding
import hardware
import smollm
import steps
import torch
from engines import Engines, looping_prompts
from specdecode import LLM, SamplingParams
from specdecode.bench.profiling import PROFILED_TOKENS, STAGES, profile
from tables import Column, table
from timing import random_prompts

#: Section -> seconds it takes at the least: it is left out where the budget has fewer left.
LEAST = {
    "hardware": 5, "plain": 40, "steps": 20, "ngram": 30, "synthetic": 40, "heads": 30, "transformers": 45,
    "vllm": 0, "smollm": 60, "adaptive": 90,
}  # fmt: skip
HARDWARE = (Column("what", "of the card"), Column("value", "", ".2f"), Column("unit", "unit"))
PROFILE = (
    Column("method", "method"),
    Column("batch_size", "batch"),
    Column("steps", "steps"),
    Column("step_ms", "ms/step", ".3f"),
    *(Column(f"{stage}_ms", stage, ".3f") for stage in STAGES),
    Column("unused", "GPU unused", ".1%"),
)
STEPS = (
    Column("batch", "batch"),
    Column("tokens", "tokens a row"),
    Column("forward_ms", "forward, ms", ".3f"),
    Column("step_ms", "step, ms", ".3f"),
    Column("to_one", "to 1 token", ".3f"),
    Column("deciding", "deciding", ".1%"),
)


@attrs.define
class Run:
    """One run: its options, its engines, and what was measured so far."""

    options: argparse.Namespace
    engines: Engines
    environment: dict[str, Any]
    started: float = attrs.Factory(time.perf_counter)
    sections: dict[str, list[dict[str, Any]]] = attrs.Factory(dict)

    def left(self) -> float:
        """Seconds of the budget."""
        return self.options.budget - (time.perf_counter() - self.started)

    def rows(self, section: str) -> list[dict[str, Any]]:
        return self.sections.get(section, [])

    def store(self, section: str, title: str, columns: Any, rows: list[dict[str, Any]]) -> None:
        """Print and keep ``rows``, behind those that the section has."""
        self.sections.setdefault(section, []).extend(rows)
        if rows:
            print(table(title, columns, rows), flush=True)
        self.write()

    def write(self) -> None:
        if self.options.json:
            report = {
                "environment": self.environment,
                "seconds": time.perf_counter() - self.started,
                "start_seconds": self.engines.start_seconds,
                "sections": self.sections,
            }
            self.options.json.write_text(json.dumps(report, indent=1) + "\n")

    @property
    def batches(self) -> tuple[int, ...]:
        return tuple(self.options.batches)

    @property
    def size(self) -> decoding.Size:
        return decoding.Size(
            batches=self.batches,
            context=self.options.context,
            new_tokens=self.options.new_tokens,
            repeats=self.options.repeats,
        )

    def drafting_size(self) -> decoding.Size:
        """Without the batches at which nobody drafts."""
        return attrs.evolve(self.size, batches=tuple(b for b in self.batches if b <= decoding.MANY))

    def profile(self, llm: LLM, method: str, *, looping: bool = False) -> None:
        """Where a step's time goes by a trace, where ``--trace-dir`` asks for one."""
        folder = self.options.trace_dir
        if folder is None or self.left() < 20:
            return
        folder.mkdir(parents=True, exist_ok=True)
        found = []
        for batch in self.drafting_size().batches:
            make = looping_prompts if looping else random_prompts
            prompts = make(batch, self.options.context, llm.llm_engine.target.vocab_size, 1)
            params = SamplingParams(
                temperature=0.0, max_tokens=PROFILED_TOKENS, ignore_eos=True, detokenize=False
            )
            ids = [prompt["prompt_token_ids"] for prompt in prompts]
            row = attrs.asdict(profile(llm, method, ids, params, folder))
            if row["idle_ms"] is not None:  # None: there is no GPU
                row["unused"] = (row["host_ms"] + row["idle_ms"]) / row["step_ms"]
            found.append(row)
        self.store("profile", f"A step of {method} by its trace, ms", PROFILE, found)

    def plain_engine(self) -> LLM:
        return self.engines.get("plain", max_num_seqs=max(self.batches))


# -- sections -----------------------------------------------------------------------------------------
def _hardware(run: Run) -> None:
    rows = hardware.measure(torch.device(run.environment["device"]), run.options.dtype)
    run.store("hardware", run.environment["device_name"], HARDWARE, rows)


def _plain(run: Run) -> None:
    rate = next((row["value"] * 1e12 for row in run.rows("hardware") if row["what"] == "copy"), None)
    llm = run.plain_engine()
    rows = decoding.rows(llm, "plain", run.size, bytes_per_s=rate)
    run.store("plain", "Plain decoding", decoding.COLUMNS, rows)
    run.profile(llm, "plain")


def _steps(run: Run) -> None:
    batches = run.drafting_size().batches
    rows = steps.cost_curve(run.plain_engine(), batches, run.options.context, run.left)
    run.store("steps", "The target's step alone, by tokens of a row", STEPS, rows)


def _ngram(run: Run) -> None:
    size = run.drafting_size()
    for length in decoding.NGRAM_LENGTHS:
        name, config = f"ngram k={length}", decoding.ngram(length)
        llm = run.engines.get(name, max_num_seqs=max(size.batches), speculative_config=config, looping=True)
        rows = decoding.rows(llm, name, size, looping=True, plain=run.rows("plain"), steps=run.rows("steps"))
        run.store("ngram", f"{name} on text that loops", decoding.COLUMNS, rows)
        if length == decoding.NGRAM_LENGTHS[0]:
            run.profile(llm, "ngram", looping=True)


def _synthetic(run: Run) -> None:
    from specdecode.testing import scripted

    scripted.install()
    size = run.drafting_size()
    for length in decoding.LENGTHS:
        for rate in decoding.ACCEPTANCE:
            if run.left() < LEAST["synthetic"]:
                print(f"synthetic: {rate:g} at k={length} left out, the budget is spent", flush=True)
                continue
            name = f"eagle k={length}, synthetic {rate:g}"
            config = decoding.synthetic(rate, length)
            llm = run.engines.get(name, max_num_seqs=max(size.batches), speculative_config=config)
            rows = decoding.rows(llm, name, size, plain=run.rows("plain"), steps=run.rows("steps"))
            for row in rows:
                row["expected_tokens"] = decoding.expected_tokens(rate, length)
            expected = f"{decoding.expected_tokens(rate, length):.2f} tokens a step"
            title = f"SYNTHETIC acceptance {rate:g}: no real drafts; {expected} expected"
            run.store("synthetic", title, decoding.COLUMNS, rows)
            if length == decoding.LENGTHS[0] and rate == decoding.ACCEPTANCE[-1]:
                run.profile(llm, "eagle-synthetic")


def _heads(run: Run) -> None:
    size, options = run.drafting_size(), run.options
    drafters = (
        ("eagle3", options.eagle3, 3, 3.0),
        ("draft_model", options.draft, 5, 3.5),
    )
    if not run.rows("steps"):  # what a step takes without its drafting
        lengths = [1 + length for _, _, length, _ in drafters]
        rows = steps.cost_curve(run.plain_engine(), size.batches, size.context, run.left, lengths)
        run.store("steps", "The target's step alone, by tokens of a row", STEPS, rows)
    for method, folder, length, acceptance in drafters:
        if run.left() < LEAST["heads"]:
            print(f"heads: {method} left out, the budget is spent", flush=True)
            continue
        name, config = f"{method} k={length}", decoding.head(method, str(folder), length, acceptance)
        llm = run.engines.get(name, max_num_seqs=max(size.batches), speculative_config=config)
        rows = decoding.rows(llm, name, size, plain=run.rows("plain"), steps=run.rows("steps"))
        run.store("heads", f"{name}, SYNTHETIC acceptance {acceptance:g}", decoding.COLUMNS, rows)
        run.profile(llm, f"{method}-synthetic")


def _adaptive(run: Run) -> None:
    llm = run.plain_engine()
    most = 2 * run.options.new_tokens
    plain = {batch: adaptive.plain_speed(llm, batch, most) for batch in run.batches}
    config = adaptive.config("eagle3", str(run.options.eagle3))
    llm = run.engines.get("adaptive", max_num_seqs=max(run.batches), speculative_config=config)
    title = "eagle3, draft lengths at SYNTHETIC acceptance: speed over plain, fixed and adaptive"
    for batch, speed in plain.items():
        run.store("adaptive", title, adaptive.COLUMNS, adaptive.rows(llm, batch, most, speed, run.left))


def _transformers(run: Run) -> None:
    run.engines.close()
    rows = beside.transformers_rows(
        run.options.shape,
        [batch for batch in run.batches if batch <= 8],
        run.options.context,
        run.rows("plain"),
        device=torch.device(run.environment["device"]),
        dtype=run.options.dtype,
    )
    run.store("transformers", "transformers, generate", beside.TRANSFORMERS, rows)


def _vllm(run: Run) -> None:
    rows = beside.vllm_rows(run.options.vllm, run.rows("plain"), run.rows("ngram") + run.rows("heads"))
    run.store("vllm", "vLLM's own run beside ours (ratios above 1: ours is faster)", beside.VLLM, rows)


def _smollm(run: Run) -> None:
    if run.options.smollm is None:
        print("smollm: left out, --smollm FILE.gguf names no model", flush=True)
        return
    run.engines.close()
    rows = smollm.measure(
        str(run.options.smollm), [b for b in run.batches if b <= 8], run.options.new_tokens // 2, run.left
    )
    run.store("smollm", "SmolLM2-135M, bfloat16, built-in tasks", smollm.COLUMNS, rows)


SECTIONS: dict[str, Callable[[Run], None]] = {
    "hardware": _hardware,
    "plain": _plain,
    "steps": _steps,
    "ngram": _ngram,
    "synthetic": _synthetic,
    "heads": _heads,
    "adaptive": _adaptive,
    "transformers": _transformers,
    "vllm": _vllm,
    "smollm": _smollm,
}
