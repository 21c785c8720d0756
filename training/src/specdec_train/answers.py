"""The target's answers, written by the engine itself: plain, batched wide, under graphs on a GPU."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from specdecode import SamplingParams
from specdecode.contract import ConfigError

from .options import DataOptions
from .prompts import encode, sources, write_user_turns
from .texts import Texts, TextStore, read_json, write_json
from .waves import in_waves

logger = logging.getLogger(__name__)

#: Waves of a full batch in one shard: at the end of each a batch runs empty.
_WAVES = 8
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

    Equal seeds write equal shards, whatever was there before. The first ``held_out`` documents are for
    evaluation: they are answered greedily.

    Args:
        llm_of: makes the engine; called only if something is missing.
        advance: told the answer tokens so far and the rate.

    Raises:
        ConfigError: there is nothing to make them from.
    """
    done = store.folder / "texts.json"
    parts = store.load()
    if read_json(done) is None:
        conversations, endless = sources(data)
        began, written = clock(), 0
        limit = None if options.data_minutes is None else 60 * options.data_minutes
        with llm_of() as llm:
            work = _Work(llm, conversations, endless, options)
            have = sum(part.answer_tokens for part in parts)
            while have < options.data_tokens and (limit is None or clock() - began < limit or not parts):
                texts = work.shard(len(parts), options.data_tokens - have)
                if texts is None:
                    logger.warning(
                        "--data: the prompts are used up after %d answer tokens of the %d of --data-tokens; "
                        'give more of them, or "self"',
                        have,
                        options.data_tokens,
                    )
                    break
                store.save(len(parts), texts)
                parts.append(texts)
                have += texts.answer_tokens
                written += texts.answer_tokens
                advance(have, f"{written / (clock() - began):,.0f} tokens/s")
        if not parts:
            raise ConfigError("--data: no prompt is short enough for --prompt-tokens, or none was written")
        write_json(done, {"documents": sum(map(len, parts)), "answer_tokens": have})
    return Texts.joined(parts)


class _Work:
    """Makes shard after shard; each depends on its number and the seed alone."""

    def __init__(self, llm: Any, conversations: list[Any], endless: bool, options: DataOptions) -> None:
        self._llm, self._endless, self._options = llm, endless, options
        order = np.random.default_rng(options.seed).permutation(len(conversations))
        self._conversations = [conversations[index] for index in order]
        self._size = _WAVES * options.batch_size

    def shard(self, number: int, wanted: int) -> Texts | None:
        """None: there are no prompts left."""
        options = self._options
        held_out = options.held_out if number == 0 else 0
        size = min(self._size, held_out + -(-2 * wanted // options.answer_tokens) + 1)
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
        return 0 < len(ids) <= self._options.prompt_tokens
