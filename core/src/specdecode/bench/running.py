"""Runs the same prompts on a plain and on a speculative engine, in turn, in one process."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import attrs

from specdecode.contract import ConfigError

from .counters import Counters, Reading
from .tasks import Task

#: What the rows without speculation are called.
PLAIN = "plain"


class Engine(Protocol):
    """What of :class:`specdecode.LLM` a benchmark uses."""

    def generate(self, prompts: Any, sampling_params: Any, *, use_tqdm: bool) -> Sequence[Any]: ...
    def get_metrics(self) -> Sequence[Reading]: ...
    def get_tokenizer(self) -> Any: ...


@attrs.frozen(kw_only=True)
class Settings:
    """How a comparison is run."""

    batch_sizes: tuple[int, ...] = (1,)
    repeats: int = 1  #: each engine runs each prompt so many times
    warmup_tokens: int = 8
    chat: bool = True  #: put prompts into the model's chat template, if it has one


@attrs.frozen(kw_only=True)
class Mismatch:
    """The first token at which an output parts from the plain one."""

    task: str
    prompt: str
    batch_size: int
    position: int
    plain: int | None  #: None: the output had ended
    other: int | None  #: what was written instead

    def __str__(self) -> str:
        return (
            f"task {self.task}, prompt {self.prompt}, batch size {self.batch_size}: output token "
            f"{self.position} is {_shown(self.other)}, without speculation {_shown(self.plain)}"
        )


def _shown(token: int | None) -> str:
    return "missing" if token is None else str(token)


@attrs.frozen(kw_only=True)
class Measurement:
    """One engine on one task at one batch size, over all repeats."""

    task: str
    method: str
    batch_size: int
    seconds: float
    counters: Counters
    outputs: tuple[Any, ...]  #: one RequestOutput a prompt, of the first repeat
    mismatches: tuple[Mismatch, ...] = ()

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens by wall-clock time, prompts included."""
        return self.counters.generated / self.seconds


@attrs.frozen(kw_only=True)
class Comparison:
    """Plain and speculative decoding of the same prompts."""

    plain: Measurement
    speculative: Measurement

    @property
    def speedup(self) -> float:
        return self.speculative.tokens_per_s / self.plain.tokens_per_s

    @property
    def identical(self) -> bool:
        """All runs of both engines wrote the same tokens."""
        return not self.speculative.mismatches and not self.plain.mismatches


def encode(tokenizer: Any, text: str, *, chat: bool = True) -> list[int]:
    """Token ids of ``text``: as a user's message in the chat template, if there is one, or as it is."""
    if chat and tokenizer.chat_template:
        messages = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        # The template wrote the special tokens that belong there.
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return list(tokenizer(text)["input_ids"])


def count_runs(tasks: Sequence[Task], settings: Settings) -> int:
    """How often :func:`compare` calls ``advance``."""
    batches = sum(math.ceil(len(task.prompts) / size) for task in tasks for size in settings.batch_sizes)
    return 2 * settings.repeats * batches


def compare(
    plain: Engine,
    speculative: Engine,
    method: str,
    tasks: Sequence[Task],
    params: Any,
    settings: Settings,
    *,
    advance: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[Comparison]:
    """Run ``tasks`` on both engines, warmed up and in turn; one comparison a task and batch size.

    Prompts go in batches of one size; a task with too few repeats them to fill the last one. The
    engines run a batch one after the other, and each is the first as often as the other.
    Every output is compared with the plain engine's first one of that prompt, token by token.

    Args:
        method: what to call the speculative engine.
        params: SamplingParams of every request: greedy, or with a seed.
        advance: called after each run of a batch, for a progress bar.
        clock: seconds.
    """
    sides = (_Side(PLAIN, plain), _Side(method, speculative))
    order = itertools.cycle((sides, sides[::-1]))
    tokenizer = plain.get_tokenizer()
    for size in settings.batch_sizes:
        for number, task in enumerate(tasks):
            batches = _batches(task, size, lambda text: encode(tokenizer, text, chat=settings.chat))
            for side in sides:
                side.reset()
                if number == 0:
                    side.warm_up(batches[0], params, settings.warmup_tokens)
            for batch in batches * settings.repeats:
                for side in next(order):
                    side.run(batch, params, clock)
                    advance()
            expected = sides[0].first
            first, second = (side.measurement(task, size, expected) for side in sides)
            yield Comparison(plain=first, speculative=second)


@attrs.frozen
class _Batch:
    """Prompts that are run together."""

    task: str
    prompt_ids: tuple[str, ...]
    token_ids: tuple[list[int], ...]


def _batches(task: Task, size: int, tokenize: Callable[[str], list[int]]) -> list[_Batch]:
    """The prompts of ``task`` in batches of ``size``, the last one filled up from the start."""
    encoded = [(prompt.id, tokenize(prompt.text)) for prompt in task.prompts]
    number = math.ceil(len(encoded) / size)
    filled = itertools.islice(itertools.cycle(encoded), number * size)
    return [_Batch(task.name, *zip(*itertools.islice(filled, size), strict=True)) for _ in range(number)]


class _Side:
    """One engine of a comparison, and what it did on the task at hand."""

    def __init__(self, name: str, engine: Engine) -> None:
        self.name = name
        self.engine = engine
        self.reset()

    def reset(self) -> None:
        self.seconds = 0.0
        self.counters = Counters()
        self.first: dict[str, Any] = {}  # prompt id -> RequestOutput
        self.written: list[tuple[str, tuple[int, ...]]] = []  # prompt id, output ids

    def warm_up(self, batch: _Batch, params: Any, tokens: int) -> None:
        self._generate(batch, params.clone(max_tokens=tokens, min_tokens=0))

    def run(self, batch: _Batch, params: Any, clock: Callable[[], float]) -> None:
        before = Counters.read(self.engine.get_metrics())
        start = clock()
        outputs = self._generate(batch, params)
        self.seconds += clock() - start
        self.counters += Counters.read(self.engine.get_metrics()) - before
        for prompt, output in zip(batch.prompt_ids, outputs, strict=True):
            self.first.setdefault(prompt, output)
            self.written.append((prompt, tuple(output.outputs[0].token_ids)))

    def _generate(self, batch: _Batch, params: Any) -> Sequence[Any]:
        prompts = [{"prompt_token_ids": ids} for ids in batch.token_ids]
        try:
            return self.engine.generate(prompts, params, use_tqdm=False)
        except ConfigError as error:
            where = f"task {batch.task}, prompts {', '.join(dict.fromkeys(batch.prompt_ids))}"
            raise ConfigError(*(f"{where}: {fault}" for fault in error.faults)) from error

    def measurement(self, task: Task, size: int, expected: dict[str, Any]) -> Measurement:
        mismatches = []
        for prompt, tokens in self.written:
            wanted = tuple(expected[prompt].outputs[0].token_ids)
            if tokens != wanted:
                mismatches.append(_first_difference(task.name, prompt, size, wanted, tokens))
        return Measurement(
            task=task.name,
            method=self.name,
            batch_size=size,
            seconds=self.seconds,
            counters=self.counters,
            outputs=tuple(self.first[prompt.id] for prompt in task.prompts),
            mismatches=tuple(dict.fromkeys(mismatches)),
        )


def _first_difference(
    task: str, prompt: str, size: int, wanted: tuple[int, ...], tokens: tuple[int, ...]
) -> Mismatch:
    pairs = itertools.zip_longest(wanted, tokens)
    position, (plain, other) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
    return Mismatch(task=task, prompt=prompt, batch_size=size, position=position, plain=plain, other=other)
