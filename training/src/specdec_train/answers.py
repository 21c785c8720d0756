"""The target's answers, written by the engine itself: plain, batched wide, under graphs on a GPU."""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from typing import Any

import numpy as np
import torch
from specdecode import SamplingParams
from specdecode.contract import ConfigError

from .options import DataOptions
from .prompts import encode, sources, write_user_turns
from .texts import Texts, TextStore, read_json, write_json
from .waves import in_waves

logger = logging.getLogger(__name__)

#: Waves of a full batch in one shard: at the end of each a batch runs empty.
_WAVES = 8
#: Seconds between two looks at what several writers have done.
_LOOK = 2.0
#: Seeds of a shard's requests lie this far from the next shard's.
_SEEDS = 1 << 20


def make_texts(
    llm_of: Callable[[], Any],
    store: TextStore,
    data: Sequence[str],
    options: DataOptions,
    *,
    advance: Callable[[int, str], None] = lambda tokens, rate: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Texts:
    """Write answers until there are enough, shard by shard; what ``store`` holds is kept and counted.

    Equal seeds write equal shards, whatever was there before and however many write. The first ``held_out``
    documents are for evaluation: they are answered greedily.

    Args:
        llm_of: makes the engine; called only if something is missing. With several writers it is sent to
            other processes.
        advance: told the answer tokens so far and the rate.

    Raises:
        ConfigError: there is nothing to make them from.
    """
    done = store.folder / "texts.json"
    if read_json(done) is None:
        sources(data)  # what cannot be read is told before an engine is made
        before = sum(part.answer_tokens for part in store.load())
        began = clock()

        def told() -> None:
            have = sum(part.answer_tokens for part in store.load())
            advance(have, f"{(have - before) / (clock() - began):,.0f} tokens/s")

        if options.writers == 1:
            exhausted = write_shards(llm_of, store, data, options, told=told, clock=clock)
        else:
            exhausted = _write_side_by_side(llm_of, store, data, options, told)
        parts = store.load()
        have = sum(part.answer_tokens for part in parts)
        if exhausted and have < options.data_tokens:
            logger.warning(
                "--data: the prompts are used up after %d answer tokens of the %d of --data-tokens; "
                'give more of them, or "self"',
                have,
                options.data_tokens,
            )
        if not parts:
            raise ConfigError(
                "--data: no prompt is short enough for --prompt-tokens and the model, or none was written"
            )
        write_json(done, {"documents": sum(map(len, parts)), "answer_tokens": have})
    return Texts.joined(store.load())


def write_shards(
    llm_of: Callable[[], Any],
    store: TextStore,
    data: Sequence[str],
    options: DataOptions,
    writer: int = 0,
    *,
    told: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> bool:
    """What writer ``writer`` of ``options.writers`` does: every so manieth shard, one at least, until there
    are enough.

    Returns:
        Whether it ran out of prompts.
    """
    limit = None if options.data_minutes is None else 60 * options.data_minutes
    with llm_of() as llm:
        began = clock()
        work = _Work(llm, *sources(data), options)
        number = writer
        while True:
            have = sum(part.answer_tokens for part in store.load())
            late = limit is not None and clock() - began >= limit
            # Each writes its first one, however fast the others are: the held-out texts are in shard 0.
            if number != writer and (have >= options.data_tokens or late):
                return False
            if not store.file(number).is_file():
                texts = work.shard(number, options.data_tokens - have)
                if texts is None:
                    return True
                store.save(number, texts)
                told()
            number += options.writers


def _write_side_by_side(
    llm_of: Callable[[], Any],
    store: TextStore,
    data: Sequence[str],
    options: DataOptions,
    told: Callable[[], None],
) -> bool:
    """Writers in processes of their own; whether any ran out of prompts."""
    spawn = multiprocessing.get_context("spawn")  # a forked process cannot use a GPU
    with ProcessPoolExecutor(options.writers, mp_context=spawn) as pool:
        writing = {
            pool.submit(_write_on_its_gpu, llm_of, store, data, options, writer)
            for writer in range(options.writers)
        }
        waiting, seen = writing, 0
        while waiting:
            _, waiting = wait(waiting, timeout=_LOOK, return_when=FIRST_COMPLETED)
            if (shards := len(store.files())) > seen:
                seen = shards
                told()
        return any([each.result() for each in writing])  # noqa: C419  all are waited for


def _write_on_its_gpu(
    llm_of: Callable[[], Any], store: TextStore, data: Sequence[str], options: DataOptions, writer: int
) -> bool:
    """:func:`write_shards` in a fresh process: the GPUs that may be seen are taken in turn."""
    if (count := torch.cuda.device_count()) > 1:
        seen = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
        os.environ["CUDA_VISIBLE_DEVICES"] = seen.split(",")[writer % count]
    return write_shards(llm_of, store, data, options, writer)


class _Work:
    """Makes shard after shard; each depends on its number and the seed alone."""

    def __init__(self, llm: Any, conversations: list[Any], endless: bool, options: DataOptions) -> None:
        self._llm, self._endless, self._options = llm, endless, options
        order = np.random.default_rng(options.seed).permutation(len(conversations))
        self._conversations = [conversations[index] for index in order]
        self._size = _WAVES * options.batch_size
        # A model of short context has room for less than was asked for, and an answer has a token at least.
        self._longest = min(options.prompt_tokens, llm.llm_engine.target.max_model_len - 1)

    def shard(self, number: int, wanted: int) -> Texts | None:
        """None: there are no prompts left."""
        options = self._options
        held_out = options.held_out if number == 0 else 0
        size = self._size
        if options.writers == 1:  # the last shard is as short as it can be
            size = min(size, held_out + -(-2 * wanted // options.answer_tokens) + 1)
        seed = (options.seed * 1_000_003 + number) * _SEEDS
        # Where there are both, half of a shard is the target's own.
        of_files = self._size // 2 if self._endless else self._size
        given = self._conversations[number * of_files :][: min(size, of_files)]
        if self._endless:
            count = size - len(given)
            own = write_user_turns(
                self._llm, count, seed, max_tokens=options.user_tokens, batch_size=options.batch_size
            )
            given = [*given, *own]
            given = [given[index] for index in np.random.default_rng(seed).permutation(len(given))]
        tokenizer = self._llm.get_tokenizer()
        prompts = [ids for ids in (encode(tokenizer, prompt) for prompt in given) if self._fits(ids)]
        if not prompts:
            return None
        temperatures = options.temperature_list
        params = [
            SamplingParams(
                temperature=0.0 if index < held_out else temperatures[index % len(temperatures)],
                max_tokens=options.answer_tokens,
                seed=seed + index,
                detokenize=False,
            )
            for index in range(len(prompts))
        ]
        asked = [{"prompt_token_ids": ids} for ids in prompts]
        answers = [ids for ids, _ in in_waves(self._llm, asked, params, options.batch_size)]
        return Texts.of(
            prompts,
            answers,
            [wish.temperature == 0 for wish in params],
            [index < held_out for index in range(len(prompts))],
        )

    def _fits(self, ids: list[int]) -> bool:
        return 0 < len(ids) <= self._longest
