"""Batch jobs: the rows of a Ray Data dataset answered by a pool of engines."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
from ray.data import ActorPoolStrategy
from specdecode import AsyncLLM, CompletionOutput, SamplingParams
from specdecode.api.args import EngineArgs
from specdecode.api.chat import ChatOptions, chat_prompt
from specdecode.api.engine_thread import EngineDeadError
from specdecode.api.params import RequestOutputKind
from specdecode.contract import ConfigError, SpecdecodeError

from .app import resources_of
from .config import FleetConfig

if TYPE_CHECKING:
    from ray.data import Dataset

logger = logging.getLogger(__name__)

#: Columns that may hold a row's prompt, the first that is there: text, token ids, a conversation.
PROMPT_COLUMNS = ("prompt", "prompt_token_ids", "messages")
#: Times that a batch is tried again when the engine's process dies with it.
RETRIES = 3

Row = dict[str, Any]


def generate(
    dataset: Dataset,
    model: str,
    params: SamplingParams | None = None,
    *,
    num_engines: int = 1,
    batch_size: int = 64,
    cpus_per_engine: float = 1.0,
    gpus_per_engine: float | None = None,
    **engine: Any,
) -> Dataset:
    """Answer every row, lazily, as Ray Data does it.

    A row's prompt is its column ``prompt`` (text), ``prompt_token_ids`` or ``messages`` (a conversation);
    a column ``seed`` is that of the row. The columns ``text``, ``token_ids`` and ``finish_reason`` are
    added, lists of them with ``n > 1``, and ``error``: why a row could not be answered, else empty.

    An engine whose process or machine dies is started again and its batches are answered again, at most
    :data:`RETRIES` times; then the job fails.

    Args:
        dataset: of prompts.
        model: directory, or hub id in the local cache, on every machine.
        params: of all rows; None: the model's defaults.
        num_engines: actors with an engine each.
        batch_size: rows handed to an engine at a time; it works on several such batches at once.
        gpus_per_engine: that Ray books; None: ``tensor_parallel_size``, or 0 without GPUs in the cluster.
        engine: further keywords of :class:`~specdecode.AsyncLLM`.

    Raises:
        ConfigError: wrong keywords of the engine.
    """
    keywords = {"model": model, **engine}
    sizes = FleetConfig(cpus_per_replica=cpus_per_engine, gpus_per_replica=gpus_per_engine)
    booked = resources_of(sizes, EngineArgs.of(keywords))["ray_actor_options"]
    return dataset.map_batches(
        Answers,
        fn_constructor_args=[keywords, params],
        batch_size=batch_size,
        batch_format="numpy",
        compute=ActorPoolStrategy(size=num_engines),
        num_cpus=booked["num_cpus"],
        num_gpus=booked["num_gpus"] or None,
        max_restarts=RETRIES,
        max_task_retries=RETRIES,
    )


class Answers:
    """One engine of the pool; Ray Data makes it in an actor and calls it with batches."""

    def __init__(self, engine: Mapping[str, Any], params: SamplingParams | None) -> None:
        self._llm = AsyncLLM(**engine)
        wish = self._llm.get_default_sampling_params() if params is None else params
        self._params = wish.clone(output_kind=RequestOutputKind.FINAL_ONLY)
        self._ids = map(str, itertools.count())

    async def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The batch with the columns of its answers."""
        rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        answers = await asyncio.gather(*map(self._answer, rows))
        columns = {name: _column([answer[name] for answer in answers]) for name in answers[0]}
        return {**batch, **columns}

    async def _answer(self, row: Row) -> Row:
        try:
            seed = _seed_of(row)
            params = self._params if seed is None else self._params.clone(seed=seed)
            prompt = await self._llm.at_the_door(lambda: self._prompt(row))
            outputs = [output async for output in self._llm.generate(prompt, params, next(self._ids))]
        except EngineDeadError:
            # An exception would fail the job; a process that dies is started again, with its batches.
            logger.critical("the engine has stopped, and this process with it", exc_info=True)
            os._exit(1)
        except (SpecdecodeError, ValueError) as error:
            return _row([], self._params.n, str(error))
        completions = outputs[-1].outputs
        errors = [completion.error for completion in completions if completion.error is not None]
        return _row(completions, self._params.n, "; ".join(errors))

    def _prompt(self, row: Row) -> Any:
        name = next((name for name in PROMPT_COLUMNS if row.get(name) is not None), None)
        match name:
            case "prompt":
                return str(row["prompt"])
            case "prompt_token_ids":
                return {"prompt_token_ids": np.asarray(row[name]).tolist()}
            case "messages":
                messages = [dict(message) for message in row["messages"]]
                return chat_prompt(
                    self._llm.get_tokenizer(), messages, ChatOptions(), media=self._llm.facts.media
                )
        raise ConfigError(f"the row has no prompt: give it one of the columns {', '.join(PROMPT_COLUMNS)}")

    def __del__(self) -> None:
        if hasattr(self, "_llm"):
            self._llm.shutdown()


def _seed_of(row: Row) -> int | None:
    """Of the row itself; where only some rows have one, Ray Data has NaN for the others."""
    seed = row.get("seed")
    return None if seed is None or seed != seed else int(seed)


def _row(completions: Any, n: int, error: str) -> Row:
    """The columns of a row; ``completions`` are none where it could not be answered."""
    nothing = CompletionOutput(index=0, text="", token_ids=(), finish_reason="error")
    told = [completions[i] if completions else attrs.evolve(nothing, index=i) for i in range(n)]
    columns: dict[str, list[Any]] = {
        "text": [one.text for one in told],
        "token_ids": [list(one.token_ids) for one in told],
        "finish_reason": [one.finish_reason for one in told],
    }
    return {**(columns if n > 1 else {name: values[0] for name, values in columns.items()}), "error": error}


def _column(values: list[Any]) -> Any:
    """An array with a value each row, lists of whatever lengths among them."""
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column
