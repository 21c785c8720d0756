"""``specdecode chat``: a conversation, streamed as it is drawn."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterator
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import attrs
import typer

from specdecode.contract import ConfigError

from . import arguments
from .arguments import check_show_drafts, engine_options, speculation_of

_SAMPLING = "Sampling"

#: Commands typed instead of a message.
COMMANDS = {
    "/exit": "end the conversation (so does the end of input)",
    "/reset": "forget what was said so far",
    "/help": "this list",
}


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("chat")(chat)


def chat(
    model: arguments.Model,
    system: Annotated[
        str | None, typer.Option("--system", help="What the model is told before the conversation.")
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Jinja template instead of the tokenizer's own.")
    ] = None,
    show_drafts: Annotated[
        bool, typer.Option("--show-drafts", help="Mark the tokens that came as accepted drafts.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object an answer.")] = False,
    max_tokens: Annotated[
        int, typer.Option(help="Most tokens of an answer.", rich_help_panel=_SAMPLING)
    ] = 512,
    temperature: Annotated[
        float, typer.Option(help="0 is greedy: always the likeliest token.", rich_help_panel=_SAMPLING)
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option(help="Keep the likeliest tokens that hold this mass.", rich_help_panel=_SAMPLING)
    ] = 1.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1: less of what is in the text already.", rich_help_panel=_SAMPLING)
    ] = 1.0,
    seed: Annotated[
        int | None,
        typer.Option(help="Same seed, same tokens, with and without speculation.", rich_help_panel=_SAMPLING),
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
    """Talk with a model. A line is a message; input may come from a pipe. /help lists the commands."""
    speculation = speculation_of(spec_config, spec_method, spec_model, spec_tokens, spec_option)
    check_show_drafts(show_drafts, speculation)
    template = _read(chat_template)

    from specdecode import LLM, SamplingParams
    from specdecode.api.chat import ChatOptions

    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )
    options = engine_options(dtype, quantization, device, max_model_len, no_plugin, tensor_parallel_size)
    with LLM(model, speculative_config=speculation, **options) as llm:
        writer = JsonWriter() if as_json else TextWriter(llm.get_tokenizer() if show_drafts else None)
        talk = Conversation(llm.llm_engine, params, ChatOptions(chat_template=template), system)
        converse(talk, writer, typed=sys.stdin.isatty())


def _read(path: Path | None) -> str | None:
    try:
        return None if path is None else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template: cannot read {path}: {error}") from None


class Conversation:
    """Messages so far, and the engine that answers."""

    def __init__(self, engine: Any, params: Any, options: Any, system: str | None) -> None:
        from specdecode import RequestOutputKind

        self._engine = engine
        self._params = params.clone(output_kind=RequestOutputKind.DELTA)
        self._options = options
        self._system = [{"role": "system", "content": system}] if system else []
        self._ids = count()
        self.reset()

    def reset(self) -> None:
        self.messages: list[dict[str, str]] = list(self._system)

    def answer(self, message: str) -> Generator[Any, None, None]:
        """Outputs as they come, each with what is new; interrupted, what was said is kept.

        Raises:
            ConfigError: the conversation is too long or the template refuses it; the message is forgotten.
        """
        from specdecode.api.chat import chat_prompt

        asked = [*self.messages, {"role": "user", "content": message}]
        request_id = f"chat-{next(self._ids)}"
        prompt = chat_prompt(self._engine.tokenizer, asked, self._options)
        self._engine.add_request(request_id, prompt, self._params)
        text = ""
        try:
            while self._engine.has_unfinished_requests():
                for output in self._engine.step():
                    text += output.outputs[0].text
                    yield output
        finally:
            self._engine.abort_request(request_id)
            self.messages = [*asked, {"role": "assistant", "content": text}]


def converse(talk: Conversation, writer: Any, *, typed: bool) -> None:
    """Read messages and write answers until /exit or the end of input.

    Args:
        typed: a person types: there is a prompt, and a mistake does not end the conversation.
    """
    for line in _lines("> " if typed else ""):
        message = line.strip()
        if message == "/exit":
            return
        if message == "/reset":
            talk.reset()
        elif message == "/help":
            for command, meaning in COMMANDS.items():
                typer.echo(f"{command:8}{meaning}", err=True)
        elif message:
            try:
                with interrupts() as interrupted:
                    writer.write(message, _until(interrupted, talk.answer(message)))
            except ConfigError as error:
                if not typed:
                    raise
                typer.secho(f"{error}\n(/reset forgets what was said so far)", fg=typer.colors.RED, err=True)


def _lines(prompt: str) -> Iterator[str]:
    if prompt:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  gives input() editing and history, where there is one
    while True:
        try:
            yield input(prompt)
        except (EOFError, KeyboardInterrupt):
            return


@contextlib.contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """Ctrl-C between two steps: what it gives tells whether it was pressed. The second press raises."""
    pressed = False

    def press(*_: Any) -> None:
        nonlocal pressed
        pressed = True
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


def _until(stopped: Callable[[], bool], outputs: Generator[Any, None, None]) -> Iterator[Any]:
    with contextlib.closing(outputs):
        for output in outputs:
            yield output
            if stopped():
                return


class TextWriter:
    """Answers as text, piece by piece. ``tokenizer``: to mark accepted drafts; None: they are not marked."""

    def __init__(self, tokenizer: Any = None) -> None:
        self._tokenizer = tokenizer

    def write(self, message: str, outputs: Iterator[Any]) -> None:
        from rich.console import Console

        from specdecode.api.segments import DraftMarker

        from .show import print_marked

        console, start = Console(), time.perf_counter()
        marker = output = None
        for output in outputs:
            completion = output.outputs[0]
            if self._tokenizer is None:
                sys.stdout.write(completion.text)  # as it comes: rich would wrap it
            else:
                marker = marker or DraftMarker(self._tokenizer, output.prompt_token_ids)
                print_marked(console, marker.segments(completion, last=output.finished), end="")
            sys.stdout.flush()
        sys.stdout.write("\n")
        if output is not None and output.outputs[0].error:
            typer.secho(output.outputs[0].error, fg=typer.colors.RED, err=True)
        if output is not None and sys.stderr.isatty():
            typer.secho(_told(output.metrics, time.perf_counter() - start), dim=True, err=True)


class JsonWriter:
    """One JSON object a line and answer."""

    def write(self, message: str, outputs: Iterator[Any]) -> None:
        given = list(outputs)
        completions, last = [output.outputs[0] for output in given], given[-1]
        answer = {
            "message": message,
            "text": "".join(completion.text for completion in completions),
            "token_ids": [token for completion in completions for token in completion.token_ids],
            "token_sources": [source for completion in completions for source in completion.token_sources],
            "finish_reason": completions[-1].finish_reason,
            "error": completions[-1].error,
            "metrics": {**attrs.asdict(last.metrics), "acceptance_length": last.metrics.acceptance_length},
        }
        typer.echo(json.dumps(answer))


def _told(metrics: Any, seconds: float) -> str:
    tokens = metrics.steps + metrics.accepted + 1
    told = f"{tokens} tokens, {tokens / seconds:.1f} tokens/s"
    if metrics.acceptance_length is None:
        return told
    kind = f"{metrics.lossy} acceptance" if metrics.lossy else "acceptance"
    return f"{told}, {kind} length {metrics.acceptance_length:.2f}"
