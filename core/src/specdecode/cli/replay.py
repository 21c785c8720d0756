"""``specdecode replay``: what draft methods that read tokens alone would have given on past conversations."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import typer

from specdecode.contract import ConfigError, SpecdecodeError, TargetInfo, Unsupported

from . import arguments

if TYPE_CHECKING:
    from rich.table import Table

    from specdecode.conversations import Exchange
    from specdecode.plugins import PluginManager
    from specdecode.testing.dry import Recorded, Replayed
    from specdecode.tokenizer_files import TokenizerFiles

#: Draft lengths tried where no configuration is given.
LENGTHS = (3, 5, 10)


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("replay")(replay)


@attrs.frozen(kw_only=True)
class Tried:
    """A configuration and what it gave, or why it cannot be tried."""

    config: Mapping[str, Any]
    result: Replayed | None = None
    reason: str = ""

    @property
    def name(self) -> str:
        rest = {key: value for key, value in self.config.items() if key != "method"}
        length = rest.pop("num_speculative_tokens", None)
        parts = [self.config["method"], *([f"k={length}"] if length else [])]
        return " ".join([*parts, *(f"{key}={value}" for key, value in rest.items())])


def replay(
    file: Annotated[Path, typer.Argument(help="Past conversations: JSON lines or a JSON list.")],
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Directory, hub id or GGUF whose tokenizer cuts the texts; token ids need none."),
    ] = None,
    config: Annotated[
        list[str] | None,
        typer.Option(
            "--spec-config",
            "--speculative-config",
            metavar="JSON",
            help="A speculative_config to try. May be repeated; none: every installed method that can be "
            f"replayed, at {', '.join(map(str, LENGTHS))} draft tokens.",
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Most answers.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Answers written side by side.")] = 1,
    plot: Annotated[
        Path | None, typer.Option(help="Also draw acceptance by position (PNG, SVG, PDF).")
    ] = None,
    no_plugin: arguments.NoPlugin = None,
    as_json: arguments.AsJson = False,
) -> None:
    """Choose a draft method offline: replay past conversations, without a model and without a GPU.

    Counts the drafts that the answers on record would have accepted under greedy decoding. Tokens a step
    bound the speedup from above; what verifying costs on your machine, `specdecode bench` tells.
    """
    from specdecode.conversations import SHAPES, read_exchanges
    from specdecode.plugins import PluginManager

    exchanges = list(itertools.islice(read_exchanges(file), limit))
    if not exchanges:
        raise ConfigError(f"file: {file} holds no answer; an entry is {SHAPES}")
    texts, target = _texts(exchanges, tokenizer)
    manager = PluginManager(disabled=no_plugin or ())
    chosen = [arguments.speculation_of(text, None, None, None, None) or {} for text in config or ()]
    tried = [
        _try(manager, mapping, target, texts, batch_size, given=bool(chosen))
        for mapping in chosen or _installed(manager)
    ]
    done = sorted((t for t in tried if t.result), key=lambda t: -t.result.tokens_per_step)  # type: ignore[union-attr]
    tokens = sum(len(text.answer) for text in texts)
    if as_json:
        typer.echo(json.dumps({"answers": len(texts), "tokens": tokens, "methods": [_row(t) for t in tried]}))
    else:
        _print(done, [t for t in tried if not t.result], f"{len(texts)} answers, {tokens} tokens")
    if plot is not None:
        _draw(done, plot)
    if not done:
        raise typer.Exit(1)


def _texts(exchanges: Sequence[Exchange], tokenizer: str | None) -> tuple[list[Recorded], TargetInfo]:
    """The exchanges as ids, and what is known of the target that wrote them."""
    from specdecode.testing.dry import recorded_target

    files = None if tokenizer is None else _tokenizer(tokenizer)
    cutter = None if files is None else files.load()
    texts = [text for exchange in exchanges if (text := _cut(exchange, cutter)) is not None]
    highest = max((max(*text.prompt, *text.answer) for text in texts), default=0)
    size = highest + 1 if cutter is None else max(highest + 1, len(cutter))
    return texts, recorded_target(size, files)


def _tokenizer(model: str) -> TokenizerFiles:
    from specdecode.models import resolve_model, tokenizer_of

    return tokenizer_of(resolve_model(model, load_format="dummy"))


def _cut(exchange: Exchange, tokenizer: Any) -> Recorded | None:
    """None: nothing is left of its answer."""
    from specdecode.testing.dry import Recorded

    prompt: Any = exchange.prompt
    if not isinstance(exchange.answer, str):
        return Recorded(prompt=prompt, answer=exchange.answer)
    if tokenizer is None:
        raise ConfigError(
            "tokenizer: the file holds text, which a tokenizer must cut into tokens: add --tokenizer "
            "with the directory, hub id or GGUF file of the model that you serve"
        )
    if isinstance(prompt, str):
        ids = tokenizer(prompt).input_ids
    else:
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
    answer = tokenizer(exchange.answer, add_special_tokens=False).input_ids
    return Recorded(prompt=ids, answer=answer) if answer else None


def _installed(manager: PluginManager) -> Iterator[dict[str, Any]]:
    from specdecode.config import fields_of

    for record in manager.methods():
        if record.status != "ok":
            continue
        fields = {field.name: field for field in fields_of(manager.resolve(record.method).spec.config)}
        if any(field.required for name, field in fields.items() if name != "num_speculative_tokens"):
            continue  # a checkpoint to name, say: given by hand with --spec-config
        lengths = LENGTHS if "num_speculative_tokens" in fields else (None,)
        for length in lengths:
            rest = {} if length is None else {"num_speculative_tokens": length}
            yield {"method": record.method, **rest}


def _try(
    manager: PluginManager,
    mapping: Mapping[str, Any],
    target: TargetInfo,
    texts: Sequence[Recorded],
    batch_size: int,
    *,
    given: bool,
) -> Tried:
    from specdecode.plugins import prepare
    from specdecode.testing.dry import DryEngine

    try:
        prepared = prepare(manager, dict(mapping), target)
        proposer = prepared.build(batch_size)
        engine = DryEngine(proposer, prepared.needs, vocab_size=target.vocab_size, max_num_seqs=batch_size)
    except SpecdecodeError as error:
        if given and not isinstance(error, Unsupported):
            raise
        return Tried(config={"method": "?", **mapping}, reason=str(error))
    try:
        return Tried(config={**mapping, "method": prepared.method}, result=engine.replay(texts))
    finally:
        proposer.close()


# -- showing ------------------------------------------------------------------------------------------
def _row(tried: Tried) -> dict[str, Any]:
    result = tried.result
    if result is None:
        return {"config": dict(tried.config), "reason": tried.reason}
    return {
        "config": dict(tried.config),
        "tokens_per_step": result.tokens_per_step,
        "acceptance_length": result.acceptance_length,
        "acceptance_rate": result.acceptance_rate,
        "acceptance_per_position": _by_position(result),
        **attrs.asdict(result),
    }


def _by_position(result: Replayed) -> list[float]:
    return [count / result.drafts for count in result.accepted_at] if result.drafts else []


def _print(done: Sequence[Tried], left: Sequence[Tried], title: str) -> None:
    from rich.console import Console

    console = Console()
    if done:
        console.print(_table(done, title))
    for reason in {t.reason: t for t in left}.values():
        console.print(
            f"not replayed: {reason.config['method']}: {reason.reason}", style="dim", highlight=False
        )
    if not done:
        console.print(
            "nothing could be replayed: install a method that reads tokens, or name one", style="red"
        )


def _table(done: Sequence[Tried], title: str) -> Table:
    from rich.bar import Bar
    from rich.table import Table

    table = Table(
        title=title, caption="at: share of the drafts accepted at each place, %; us: drafting, a step"
    )
    table.add_column("method", overflow="fold")
    for name in ("tokens/step", "", "length", "rate", "drafted", "at", "us"):
        table.add_column(name, justify="left" if name in ("", "at") else "right")
    best = done[0].result.tokens_per_step  # type: ignore[union-attr]
    for tried in done:
        result = tried.result
        assert result is not None
        steps = max(1, result.verifications)
        table.add_row(
            tried.name,
            f"{result.tokens_per_step:.2f}",
            Bar(best, 0, result.tokens_per_step, width=12),
            f"{result.acceptance_length:.2f}",
            f"{result.acceptance_rate:.0%}",
            f"{result.drafted / steps:.2f}",
            " ".join(f"{100 * share:.0f}" for share in _by_position(result)),
            f"{1e6 * result.proposing_seconds / steps:.0f}",
        )
    return table


def _draw(done: Sequence[Tried], path: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SpecdecodeError("plot: matplotlib is not installed: pip install matplotlib") from None
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    names = [tried.name for tried in done]
    left.barh(names[::-1], [t.result.tokens_per_step for t in done][::-1])  # type: ignore[union-attr]
    left.axvline(1, color="grey", linewidth=0.8)
    left.set_xlabel("tokens a step")
    for tried in done:
        shares = _by_position(tried.result)  # type: ignore[arg-type]
        right.plot(range(1, len(shares) + 1), shares, marker="o", label=tried.name)
    right.set(xlabel="position", ylabel="accepted", ylim=(0, 1))
    right.legend(fontsize="small")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"plot: cannot write {path}: {error}") from None
