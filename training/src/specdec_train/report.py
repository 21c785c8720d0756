"""What is told of a trained checkpoint: ``training.json`` for programs, ``README.md`` for people."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from specdecode import models

from .evaluation import Acceptance
from .gate import Verdict
from .loop import Progress
from .target import Target
from .texts import Texts, write_json

_CURVE = 12  #: lines of the loss curve in README.md


def write_report(
    path: Path,
    *,
    run: Mapping[str, Any],
    facts: Mapping[str, Any],
    name: str,
    target: Target,
    texts: Texts,
    progress: Progress,
    held_out: Acceptance,
    verdict: Verdict | None,
    seconds: float,
    licence: str,
    speculative_config: Mapping[str, Any],
) -> dict[str, Any]:
    """Write both files into ``path``, and return what is in the first.

    Args:
        run: what was asked for.
        facts: of the checkpoint, by its recipe.
        speculative_config: how the checkpoint is run; its path is left out.
    """
    device = torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else platform.machine()
    curve = [
        {
            "step": point.step,
            "seconds": round(point.seconds, 1),
            "loss": round(point.loss, 5),
            **{key: round(value, 4) for key, value in point.terms.items()},
            **({"held_out_length": round(point.acceptance.length, 3)} if point.acceptance else {}),
        }
        for point in progress.curve
    ]
    report = {
        **run,
        **facts,
        "specdec_train": importlib.metadata.version("specdec-train"),
        "torch": torch.__version__,
        "device": device,
        "documents": len(texts),
        "held_out_documents": int(np.sum(texts.held_out)),
        "answer_tokens": texts.answer_tokens,
        "steps": progress.step,
        "tokens_seen": progress.tokens,
        "training_seconds": round(progress.seconds, 1),
        "seconds": round(seconds, 1),
        "held_out": attrs.asdict(held_out),
        "gate": None if verdict is None else {**attrs.asdict(verdict), "speedup": verdict.speedup},
        "curve": curve,
        "licence": licence,
        "target_fingerprint": models.fingerprint(target.files),
        "speculative_config": {key: value for key, value in speculative_config.items() if key != "model"},
    }
    write_json(path / "training.json", report)
    (path / "README.md").write_text(_readme(report, name, target), encoding="utf-8")
    return report


def _readme(report: Mapping[str, Any], name: str, target: Target) -> str:
    shares = ", ".join(f"{share:.3f}" for share in report["held_out"]["per_position"])
    lines = [
        f"# {name} for {report['model']}",
        "",
        f"Trained by `specdecode train {name}` (specdec-train {report['specdec_train']}) on "
        f"{report['device']}.",
        f"Licence: {report['licence']}.",
        "",
        f"- target: {target.info.architecture}, {target.info.num_layers} layers, hidden size "
        f"{target.info.hidden_size}, in {target.info.dtype}",
        f"- data: {', '.join(report['data'])}; {report['documents']} texts with {report['answer_tokens']} "
        f"tokens of answers by the target itself, {report['held_out_documents']} texts held out; seed "
        f"{report['data_options']['seed']}",
        f"- {report['steps']} steps over {report['tokens_seen']} tokens, {report['training_seconds']} s",
        f"- held-out acceptance length, greedy, {len(report['held_out']['per_position'])} drafts: "
        f"**{report['held_out']['length']:.2f}** (accepted per position: {shares})",
    ]
    if (covered := report.get("draft_vocabulary_coverage")) is not None:
        lines.append(f"- its draft vocabulary holds {covered:.2%} of the tokens of the answers")
    if gate := report["gate"]:
        lines.append(
            f"- through the engine: acceptance length {gate['acceptance_length']:.2f}, "
            f"{gate['tokens_per_s']:.1f} tokens/s, {gate['plain_tokens_per_s']:.1f} without "
            f"({gate['speedup']:.2f}x); conformance: {gate['conformance']}"
        )
    lines += ["", "Command:", "", "    " + command_of(report), "", *curve_of(report)]
    return "\n".join(lines) + "\n"


def command_of(report: Mapping[str, Any]) -> str:
    """The command that trained, over several indented lines."""
    given = {**report["options"], **report["data_options"], **report["loop_options"]}
    parts = [f"specdecode train {report['method']} --model {report['model']}"]
    parts += [f"--data {source}" for source in report["data"]]
    parts += [f"--{key.replace('_', '-')} {value}" for key, value in given.items() if _is_said(value)]
    parts += [f"--{key.replace('_', '-')}" for key, value in given.items() if value is True]
    return " \\\n        ".join([*parts, "--out DIR"])


def curve_of(report: Mapping[str, Any]) -> list[str]:
    """The loss curve, thinned out, as the lines of a table."""
    curve = report["curve"]
    chosen = sorted({round(i * (len(curve) - 1) / _CURVE) for i in range(_CURVE + 1)} if curve else set())
    return [
        "| step | loss | held-out acceptance length |",
        "| ---: | ---: | ---: |",
        *(
            f"| {point['step']} | {point['loss']:.4f} | {point.get('held_out_length', '')} |"
            for point in (curve[index] for index in chosen)
        ),
    ]


def _is_said(value: Any) -> bool:
    return value is not None and not isinstance(value, bool)
