"""Writes this distribution's README.md from the ``training.json`` of each head, so that no figure is typed.

python heads/smollm2/make_readme.py
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec_train.report import command_of, curve_of

HERE = Path(__file__).parent
PACKAGE = HERE / "src/specdec_heads_smollm2"
TARGET = "SmolLM2-135M-Instruct"

INTRODUCTION = """\
# specdec-heads-smollm2

Draft heads and draft models for SmolLM2-135M-Instruct (Apache-2.0), trained by `specdecode train`. Data only:

```python
from specdec_heads_smollm2 import path
from specdecode import LLM

llm = LLM(model, speculative_config={"model": str(path("eagle3")), "num_speculative_tokens": 3})
```

`specdecode demo` finds those that pay by the entry-point group `specdecode.heads`: given the fingerprint of
a target (`specdecode.models.fingerprint`: its sizes and its final norm), the heads that were trained for it
and are no mere references of their formats.

This file is written by `python heads/smollm2/make_readme.py` from each head's `training.json`.

## What they were trained on

- Prompts written by the target itself, given its chat template's opening (`--data self`).
- `prompts.jsonl`, by `python heads/smollm2/make_prompts.py prompts.jsonl`: tasks on texts and functions of
  Python's standard library (PSF licence; the texts are read where it is installed and none is kept here), and
  word problems from templates of this project.
- Answers by the target to these prompts. Nothing else, and no prompt of `benchmarks/data/held_out.jsonl`.

"Held out" below are prompts of the same two sources that were not trained on; figures over the prompts of
`benchmarks/data/held_out.jsonl` are in `benchmarks/RESULTS.md`.
"""


def main() -> None:
    trained = {
        file.parent.name: json.loads(file.read_text("utf-8"))
        for file in sorted(PACKAGE.glob("*/training.json"))
    }
    text = readme(trained, {name: _size(PACKAGE / name) for name in trained})
    (HERE / "README.md").write_text(text, encoding="utf-8")
    print(f"{len(trained)} heads in {HERE / 'README.md'}")


def readme(trained: Mapping[str, Mapping[str, Any]], sizes: Mapping[str, float]) -> str:
    """The text of README.md; ``sizes`` in MiB."""
    lines = [INTRODUCTION, "## The heads", ""]
    if not trained:
        return "\n".join([*lines, "None yet."]) + "\n"
    lines += [
        "| head | method | MiB | steps | tokens of answers | seed | device | minutes | held-out acceptance "
        "length | accepted at each place, % | through the engine | licence |",
        "| --- | --- | ---: | ---: | ---: | ---: | --- | ---: | ---: | --- | --- | --- |",
    ]
    lines += [_row(name, report, sizes[name]) for name, report in trained.items()]
    for name, report in trained.items():
        command = command_of({**report, "model": TARGET})
        note = [report["note"], ""] if "note" in report else []
        lines += ["", f"### {name}", "", *note, "    " + command, "", *curve_of(report)]
    return "\n".join(lines) + "\n"


def _row(name: str, report: Mapping[str, Any], size: float) -> str:
    held, gate = report["held_out"], report["gate"]
    engine = "-"
    if gate:
        engine = (
            f"length {gate['acceptance_length']:.2f}, {gate['tokens_per_s']:.0f} tokens/s, "
            f"{gate['plain_tokens_per_s']:.0f} without ({gate['speedup']:.2f}x)"
        )
    cells = [
        name,
        report["method"],
        f"{size:.1f}",
        str(report["steps"]),
        f"{report['answer_tokens']:,}",
        str(report["data_options"]["seed"]),
        report["device"],
        f"{report['training_seconds'] / 60:.1f}",
        f"**{held['length']:.2f}**",
        " ".join(f"{100 * share:.0f}" for share in held["per_position"]),
        engine,
        report["licence"],
    ]
    return "| " + " | ".join(cells) + " |"


def _size(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.iterdir()) / (1 << 20)


if __name__ == "__main__":
    main()
