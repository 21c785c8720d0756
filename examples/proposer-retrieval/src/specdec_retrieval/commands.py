"""``specdecode retrieval``: making datastores, and looking at them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from .datastore import MAX_TOKENS, Datastore

retrieval = typer.Typer(no_args_is_help=True, help="Datastores of past answers, to draft from.")


@retrieval.command()
def build(
    answers: Annotated[
        list[Path],
        typer.Argument(help="Files of JSON lines, or directories of them, the newest last."),
    ],
    out: Annotated[Path, typer.Option(help="Directory that is made.")],
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Directory, hub id or GGUF of the model that you serve: its tokenizer cuts texts."),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(min=2, max=(1 << 31) - 1, help="Most tokens kept, those of the last answers.")
    ] = MAX_TOKENS,
) -> None:
    """Make a datastore of past answers, once; engines map it into memory.

    Answers that are token ids need no tokenizer, but with one the datastore is refused for models of another.
    """
    from specdecode.contract import ConfigError
    from specdecode.conversations import read_exchanges
    from specdecode.models import resolve_model, tokenizer_of

    from . import datastore
    from .vocabulary import to_ids, vocabulary_of

    if out.exists():
        raise ConfigError(f"out: {out} is there already; remove it, or give another path")
    cutter = None
    if tokenizer is not None:
        cutter = tokenizer_of(resolve_model(tokenizer, load_format="dummy"))
    texts = (exchange.answer for exchange in read_exchanges(answers, prompts=False))
    store = datastore.build(to_ids(texts, cutter), vocabulary_of(cutter), max_tokens)
    datastore.save(store, out)
    typer.echo(json.dumps({"datastore": str(out), **_facts(store)}))


@retrieval.command()
def show(datastore: Annotated[Path, typer.Argument(help="What `build` made.")]) -> None:
    """Say what a datastore holds."""
    from .datastore import open_directory

    typer.echo(json.dumps(_facts(open_directory(datastore, "datastore"))))


def _facts(store: Datastore) -> dict[str, object]:
    return {
        "answers": store.num_answers,
        "tokens": store.num_tokens,
        "highest_id": store.highest_id,
        "vocabulary": store.vocabulary,
    }
