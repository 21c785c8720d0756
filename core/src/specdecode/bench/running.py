"""Runs the same prompts on a plain and on a speculative engine, in turn, in one process."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import attrs

from specdecode.api.chat import ChatOptions, chat_prompt
from specdecode.contract import ConfigError
from specdecode.engine.advice import Advice, SpeculationFigures, advise

from .counters import Counters, Reading
from .tasks import Prompt, Task

logger = logging.getLogger(__name__)

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

    @property
    def other_seconds(self) -> float:
        """Time that was neither the target's, nor verification, nor drafting: scheduling, detokenizing."""
        counted = self.counters
        return self.seconds - counted.target_seconds - counted.verify_seconds - counted.propose_seconds


@attrs.frozen(kw_only=True)
class Comparison:
    """Plain and speculative decoding of the same prompts."""

    plain: Measurement
    speculative: Measurement

    @property
    def speedup(self) -> float:
        return self.speculative.tokens_per_s / self.plain.tokens_per_s

    @property
    def decode_speedup(self) -> float | None:
        """Time from one token of a request to its next, plain by speculative: prompts do not count."""
        plain, speculative = (
            self.plain.counters.seconds_per_token,
            self.speculative.counters.seconds_per_token,
        )
        return plain / speculative if plain and speculative else None

    @property
    def identical(self) -> bool:
        """All runs of both engines wrote the same tokens."""
        return not self.speculative.mismatches and not self.plain.mismatches

    @property
    def efficiency(self) -> float | None:
        """The part of its tokens per target step that speculation turned into speed."""
        tokens = self.speculative.counters.tokens_per_target_step
        return self.speedup / tokens if tokens else None

    @property
    def draft_step_cost(self) -> float | None:
        """Time of drafting in a step by that of a plain step: c * gamma; None if nothing was drafted."""
        drafting = self.speculative.counters.draft_seconds_per_step
        step = self.plain.counters.seconds_per_token
        return drafting / step if drafting is not None and step else None

    @property
    def cost_ratio(self) -> float | None:
        """c: time of one draft token by that of a plain step."""
        cost, drafts = self.draft_step_cost, self.speculative.counters.drafts_per_target_step
        return cost / drafts if cost is not None and drafts else None

    @property
    def memory_bound_speedup(self) -> float | None:
        """tau / (c * gamma + 1): the speedup if a target step took no longer with drafts than without."""
        tokens, cost = self.speculative.counters.tokens_per_target_step, self.draft_step_cost
        return tokens / (cost + 1) if tokens and cost is not None else None

    def advice(self) -> Advice | None:
        """What to change, by the measured speedup."""
        counted = self.speculative.counters
        figures = SpeculationFigures(
            **{name: getattr(counted, name) for name in (a.name for a in attrs.fields(SpeculationFigures))}
        )
        return advise(figures, self.speedup, adaptive=counted.adaptive)


def encode(tokenizer: Any, prompt: str | Prompt, *, chat: bool = True) -> list[int]:
    """Token ids of ``prompt``: as messages in the chat template, if there is one, or as text."""
    if isinstance(prompt, str):
        prompt = Prompt(id="", text=prompt)
    if chat and tokenizer.chat_template:
        return list(chat_prompt(tokenizer, prompt.messages, ChatOptions())["prompt_token_ids"])
    return list(tokenizer(prompt.whole)["input_ids"])


def fitting(tasks: Sequence[Task], tokenizer: Any, longest: int, *, chat: bool) -> tuple[Task, ...]:
    """``tasks`` without the prompts of more than ``longest`` tokens, which are told on the log.

    Raises:
        ConfigError: none is left.
    """
    kept = [
        attrs.evolve(
            task,
            prompts=tuple(p for p in task.prompts if len(encode(tokenizer, p, chat=chat)) <= longest),
        )
        for task in tasks
    ]
    total, left = (sum(len(task.prompts) for task in group) for group in (tasks, kept))
    if not left:
        raise ConfigError(
            f"all {total} prompts are longer than the {longest} tokens that max_model_len less max_tokens "
            "leaves them: raise max_model_len or lower max_tokens"
        )
    if left < total:
        logger.warning(
            "%d of %d prompts are longer than %d tokens and left out", total - left, total, longest
        )
    return tuple(task for task in kept if task.prompts)


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
            batches = _batches(task, size, lambda prompt: encode(tokenizer, prompt, chat=settings.chat))
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


def first_batch(task: Task, size: int, tokenizer: Any, *, chat: bool) -> tuple[list[int], ...]:
    """Token ids of the prompts that :func:`compare` runs first at a batch size."""
    return _batches(task, size, lambda prompt: encode(tokenizer, prompt, chat=chat))[0].token_ids


@attrs.frozen
class _Batch:
    """Prompts that are run together."""

    task: str
    prompt_ids: tuple[str, ...]
    token_ids: tuple[list[int], ...]


def _batches(task: Task, size: int, tokenize: Callable[[Prompt], list[int]]) -> list[_Batch]:
    """The prompts of ``task`` in batches of ``size``, the last one filled up from the start."""
    encoded = [(prompt.id, tokenize(prompt)) for prompt in task.prompts]
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
