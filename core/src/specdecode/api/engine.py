"""LLMEngine: requests in, steps, outputs out. What LLM and a server drive."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import attrs

from ..contract import ConfigError, TargetInfo
from ..engine.metrics import Metric
from ..engine.output import RequestOutputState
from ..engine.request import Request
from ..plugins import PluginManager
from ..sampling.bad_words import BadWords
from ..sampling.history import TokenHistory, needs_history
from ..sampling.logprobs import RowLogprobs
from ..sampling.processors import LogitsProcessors
from ..sampling.seeds import UnseededStream, resolve_seed
from .args import EngineArgs
from .assemble import assemble
from .outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from .params import RequestOutputKind, SamplingParams
from .prompts import TokenizedPrompt, check_prompt, tokenize, truncate

#: A token id -> its log-probability.
TokenLogprobs = dict[int, Logprob]


@attrs.define(eq=False)
class RequestGroup:
    """A user's request: one prompt, ``n`` completions."""

    request_id: str
    prompt: TokenizedPrompt
    params: SamplingParams
    states: list[RequestOutputState] = attrs.field(factory=list)
    sent: dict[int, tuple[int, int]] = attrs.field(factory=dict)  #: index -> tokens, characters given out
    logprobs: dict[int, list[TokenLogprobs]] = attrs.field(factory=dict)  #: index -> as they are given out
    prompt_logprobs: list[TokenLogprobs | None] | None = None  #: as they are given out; None: not yet

    @property
    def finished(self) -> bool:
        return all(state.finish for state in self.states)


class LLMEngine:
    """Continuous batching behind ``add_request``, ``step`` and ``abort_request``."""

    def __init__(self, args: EngineArgs, manager: PluginManager | None = None) -> None:
        engine = assemble(args, manager)
        self.args = args
        self.core = engine.core
        self.target: TargetInfo = engine.target
        self.tokenizer = engine.tokenizer
        self.method = engine.method
        self.memory = engine.memory
        self.plugins = engine.manager
        self._eos_ids = engine.eos_ids
        self._defaults = engine.defaults
        self._unseeded = UnseededStream(args.seed)
        self._bad_words = functools.lru_cache(
            functools.partial(_bad_words, self.tokenizer, self.target.vocab_size)
        )
        self._groups: dict[str, RequestGroup] = {}
        self._group_of: dict[Request, RequestGroup] = {}
        self._serial = count()

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> LLMEngine:
        """Build from arguments.

        Raises:
            ConfigError: see :meth:`EngineArgs.of`.
        """
        return cls(EngineArgs.of(attrs.asdict(engine_args, recurse=False)))

    # -- requests -------------------------------------------------------------------------------
    def prepare(self, prompt: Any, params: SamplingParams, *, where: str = "prompt") -> TokenizedPrompt:
        """Tokenize and check a prompt and its parameters without queueing them.

        Raises:
            ConfigError: names the field, the value and the remedy; nothing was changed.
        """
        if not isinstance(params, SamplingParams):
            raise ConfigError(f"sampling_params must be SamplingParams, got {params!r}")
        params.check_vocab(self.target.vocab_size)
        if self.tokenizer is None:
            remedies = {"stop": "use stop_token_ids", "bad_words": "use logit_bias or allowed_token_ids"}
            if faults := [
                f"{name}={value!r} wants a tokenizer and skip_tokenizer_init=True left none: {remedy}"
                for name, remedy in remedies.items()
                if (value := getattr(params, name))
            ]:
                raise ConfigError(*faults)
        self._bad_words(params.bad_words or ())
        tokenized = tokenize(prompt, self.tokenizer, where=where)
        tokenized = truncate(tokenized, params.truncate_prompt_tokens, self.target.max_model_len)
        check_prompt(tokenized, self.target.vocab_size, self.target.max_model_len, where=where)
        return tokenized

    def add_request(self, request_id: str, prompt: Any, params: SamplingParams, **refused: Any) -> None:
        """Queue a request of ``params.n`` completions, as ``params`` are now.

        Raises:
            ConfigError: the prompt or the parameters cannot be served, or the id is in use.
        """
        if foreign := {name: value for name, value in refused.items() if value is not None}:
            raise ConfigError(
                *(f"{name}={value!r} is refused: it is not built yet" for name, value in foreign.items())
            )
        if request_id in self._groups:
            raise ConfigError(
                f"request_id {request_id!r} is in use: choose another, or wait until it has ended"
            )
        tokenized = prompt if isinstance(prompt, TokenizedPrompt) else self.prepare(prompt, params)
        self._add(request_id, tokenized, params.snapshot())

    def _add(self, request_id: str, prompt: TokenizedPrompt, params: SamplingParams) -> None:
        group = RequestGroup(request_id, prompt, params)
        seed = resolve_seed(params.seed, self._unseeded)
        longest = self.target.max_model_len
        wanted = longest if params.max_tokens is None else len(prompt.token_ids) + params.max_tokens
        eos_ids = frozenset() if params.ignore_eos else self._eos_ids
        leader = None
        bad_words = self._bad_words(params.bad_words or ())
        processors = [
            LogitsProcessors(params.logits_processors, prompt.token_ids) if params.logits_processors else None
            for _ in range(params.n)
        ]
        for index in range(params.n):
            request = Request(
                id=f"{request_id}/{index}#{next(self._serial)}",
                prompt_ids=prompt.token_ids,
                params=params,
                seed=seed,
                index=index,
                namespace=prompt.cache_salt,
                limit=min(longest, wanted),
                eos_ids=eos_ids,
                stop_ids=tuple(sorted({*eos_ids, *params.stop_token_ids})),
                leader=leader,
                history=TokenHistory(prompt.token_ids) if needs_history(params) else None,
                bad_words=bad_words,
                processors=processors[index],
                prompt_logprobs=params.prompt_logprobs if leader is None else None,
            )
            leader = leader or request
            self.core.add(request)
            group.states.append(self.core.outputs[request])
            self._group_of[request] = group
        self._groups[request_id] = group

    def abort_request(self, request_id: str | Sequence[str]) -> None:
        """End requests now; unknown and ended ones are passed over."""
        for name in [request_id] if isinstance(request_id, str) else request_id:
            group = self._groups.pop(name, None)
            for state in group.states if group else ():
                self.core.abort(state.request)
                self._group_of.pop(state.request, None)

    def has_unfinished_requests(self) -> bool:
        return bool(self._groups) or self.core.has_unfinished

    def get_num_unfinished_requests(self) -> int:
        return len(self._groups)

    # -- steps ----------------------------------------------------------------------------------
    def step(self) -> list[RequestOutput]:
        """Run one step; outputs of the requests it gave something to, as their ``output_kind`` says."""
        touched: dict[str, RequestGroup] = {}
        for state in self.core.step():
            group = self._group_of.get(state.request)
            if group is not None:
                touched[group.request_id] = group
        return [output for group in touched.values() for output in self._emit(group)]

    def _emit(self, group: RequestGroup) -> Iterator[RequestOutput]:
        finished = group.finished
        if finished:
            del self._groups[group.request_id]
            for state in group.states:
                self._group_of.pop(state.request, None)
        if finished or group.params.output_kind is not RequestOutputKind.FINAL_ONLY:
            yield self._output(group, finished)

    def _output(self, group: RequestGroup, finished: bool) -> RequestOutput:
        delta = group.params.output_kind is RequestOutputKind.DELTA
        return RequestOutput(
            request_id=group.request_id,
            prompt=group.prompt.text,
            prompt_token_ids=group.prompt.token_ids,
            outputs=[self._completion(group, state, delta) for state in group.states],
            finished=finished,
            prompt_logprobs=self._prompt_logprobs(group, delta),
            metrics=_metrics(group),
            num_cached_tokens=group.states[0].request.stats.cached_tokens,
        )

    def _completion(self, group: RequestGroup, state: RequestOutputState, delta: bool) -> CompletionOutput:
        index, text = state.request.index, state.settled_text
        tokens, chars = group.sent.get(index, (0, 0)) if delta else (0, 0)
        group.sent[index] = (len(state.token_ids), len(text))
        logprobs = None
        if group.params.logprobs is not None:
            told = group.logprobs.setdefault(index, [])
            told += map(self._logprobs, state.logprobs[len(told) :])
            logprobs = told[tokens:]
        return CompletionOutput(
            index=index,
            text=text[chars:],
            token_ids=state.token_ids[tokens:],
            cumulative_logprob=sum(row.logprobs[0] for row in state.logprobs)
            if logprobs is not None
            else None,
            logprobs=logprobs,
            finish_reason=state.finish.reason if state.finish else None,  # type: ignore[arg-type]
            stop_reason=state.finish.stop_reason if state.finish else None,
            token_sources=state.sources[tokens:],
            error=state.error,
        )

    def _prompt_logprobs(self, group: RequestGroup, delta: bool) -> list[TokenLogprobs | None] | None:
        if group.params.prompt_logprobs is None:
            return None
        if group.prompt_logprobs is None:
            group.prompt_logprobs = [None, *map(self._logprobs, group.states[0].prompt_logprobs)]
        elif delta:
            return None
        return list(group.prompt_logprobs)

    def _logprobs(self, row: RowLogprobs) -> TokenLogprobs:
        decode = self.tokenizer.decode if self.tokenizer is not None else lambda ids: None
        return {
            token: Logprob(value, rank, decode([token]))
            for token, value, rank in zip(row.token_ids, row.logprobs, row.ranks, strict=True)
        }

    # -- the rest -------------------------------------------------------------------------------
    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation config asks for."""
        return SamplingParams(**self._defaults)

    def get_metrics(self) -> list[Metric]:
        return self.core.metrics.snapshot()

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; False while requests run."""
        return self.core.scheduler.pool.reset_cache()

    def shutdown(self) -> None:
        """End all requests and free proposer, KV and model. May be called twice."""
        self.core.close()
        self._groups.clear()
        self._group_of.clear()


def _bad_words(tokenizer: Any, vocab_size: int, words: tuple[str, ...]) -> BadWords | None:
    if not words:
        return None
    return BadWords.of(words, functools.partial(tokenizer.encode, add_special_tokens=False), vocab_size)


def _metrics(group: RequestGroup) -> RequestMetrics:
    stats = [state.request.stats for state in group.states]
    first = [s.first_token for s in stats if s.first_token is not None]
    done = [s.finished for s in stats if s.finished is not None]
    return RequestMetrics(
        arrival_time=stats[0].arrival,
        first_scheduled_time=stats[0].first_scheduled,
        first_token_time=min(first, default=None),
        finished_time=max(done) if len(done) == len(stats) else None,
        drafted=sum(s.drafted for s in stats),
        accepted=sum(s.accepted for s in stats),
        draft_steps=sum(s.draft_steps for s in stats),
        steps=sum(s.steps for s in stats),
        preemptions=sum(s.preemptions for s in stats),
    )
