"""``specdecode generate``: complete prompts, and show what speculation gave."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import attrs
import typer

from . import arguments
from .arguments import check_show_drafts, engine_options, speculation_of

_SAMPLING = "Sampling"


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("generate")(generate)


def generate(
    model: arguments.Model,
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", "-p", help="What to complete; '-' reads stdin. May be repeated."),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Each prompt is a user's message: put it into the chat template.")
    ] = False,
    show_drafts: Annotated[
        bool, typer.Option("--show-drafts", help="Mark the tokens that came as accepted drafts.")
    ] = False,
    as_json: arguments.AsJson = False,
    max_tokens: Annotated[
        int, typer.Option(help="Most tokens of an output.", rich_help_panel=_SAMPLING)
    ] = 256,
    temperature: Annotated[
        float, typer.Option(help="0 is greedy: always the likeliest token.", rich_help_panel=_SAMPLING)
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option(help="Keep the likeliest tokens that hold this mass.", rich_help_panel=_SAMPLING)
    ] = 1.0,
    top_k: Annotated[int, typer.Option(help="Keep so many tokens; 0: all.", rich_help_panel=_SAMPLING)] = 0,
    min_p: Annotated[
        float, typer.Option(help="Keep tokens this likely against the likeliest.", rich_help_panel=_SAMPLING)
    ] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1: less of what is in the text already.", rich_help_panel=_SAMPLING)
    ] = 1.0,
    seed: Annotated[
        int | None,
        typer.Option(help="Same seed, same tokens, with and without speculation.", rich_help_panel=_SAMPLING),
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="End the output before this text. May be repeated.", rich_help_panel=_SAMPLING),
    ] = None,
    spec_config: arguments.SpecConfig = None,
    spec_method: arguments.SpecMethod = None,
    spec_model: arguments.SpecModel = None,
    spec_tokens: arguments.SpecTokens = None,
    spec_option: arguments.SpecOption = None,
    dtype: arguments.Dtype = "auto",
    quantization: arguments.Quantization = None,
    device: arguments.Device = "auto",
    tensor_parallel_size: arguments.TensorParallelSize = 1,
    max_model_len: arguments.MaxModelLen = None,
    no_plugin: arguments.NoPlugin = None,
) -> None:
    """Complete prompts with a model, with or without speculation."""
    texts = _prompts(prompt)
    speculation = speculation_of(spec_config, spec_method, spec_model, spec_tokens, spec_option)
    check_show_drafts(show_drafts, speculation)

    from specdecode import LLM, SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=stop or [],
    )
    options = engine_options(dtype, quantization, device, max_model_len, no_plugin, tensor_parallel_size)
    with LLM(model, speculative_config=speculation, **options) as llm:
        tokenizer = llm.get_tokenizer()
        # A bar is for the eyes: nobody watches one in a pipe.
        watched = len(texts) > 1 and sys.stderr.isatty()
        if chat:
            conversations = [[{"role": "user", "content": text}] for text in texts]
            outputs = llm.chat(conversations, params, use_tqdm=watched)
        else:
            outputs = llm.generate(texts, params, use_tqdm=watched)
    if as_json:
        typer.echo(json.dumps(_as_json(model, speculation, texts, outputs)))
    else:
        _print(tokenizer, texts, outputs, show_drafts)


def _prompts(given: Sequence[str] | None) -> list[str]:
    if not given:
        raise typer.BadParameter("give at least one", param_hint="--prompt")
    return [sys.stdin.read() if text == "-" else text for text in given]


def _print(tokenizer: Any, texts: Sequence[str], outputs: Sequence[Any], show_drafts: bool) -> None:
    from rich.console import Console

    from specdecode.api.segments import Segment, segments

    from .show import legend, print_marked

    console, errors = Console(), Console(stderr=True)
    for number, (text, output) in enumerate(zip(texts, outputs, strict=True), start=1):
        completion = output.outputs[0]
        if len(texts) > 1:
            first_line = (text.strip().splitlines() or [""])[0]
            console.rule(f"{number}. {first_line[:60]}", align="left", style="dim")
        if show_drafts:
            print_marked(console, segments(tokenizer, output.prompt_token_ids, completion))
            errors.print(_drafted(output.metrics, completion), style="dim", highlight=False)
        else:
            print_marked(console, [Segment(completion.text, False)])
    if show_drafts:
        errors.print(legend(console))


def _drafted(metrics: Any, completion: Any) -> str:
    tokens, accepted = len(completion.token_ids), completion.token_sources.count("draft")
    told = f"{accepted} of {tokens} tokens were accepted drafts"
    if metrics.acceptance_length is None:
        return told
    kind = f"{metrics.lossy} acceptance" if metrics.lossy else "acceptance"
    return f"{told}; {kind} length {metrics.acceptance_length:.2f}, {metrics.steps} target steps"


def _as_json(model: str, speculation: Any, texts: Sequence[str], outputs: Sequence[Any]) -> dict[str, Any]:
    return {
        "model": model,
        "speculative_config": speculation,
        "outputs": [_output(text, output) for text, output in zip(texts, outputs, strict=True)],
    }


def _output(text: str, output: Any) -> dict[str, Any]:
    completion, metrics = output.outputs[0], output.metrics
    return {
        "prompt": text,
        "prompt_token_ids": list(output.prompt_token_ids),
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "token_sources": list(completion.token_sources),
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "metrics": {**attrs.asdict(metrics), "acceptance_length": metrics.acceptance_length},
    }
