"""LLMEngine: requests in, steps, outputs out. What LLM and a server drive."""

from __future__ import annotations

import functools
import logging
import zlib
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import attrs

from ..contract import ConfigError, TargetInfo
from ..engine.metrics import Metric
from ..engine.output import RequestOutputState
from ..engine.request import Request
from ..lora.request import LoRARequest
from ..lora.slots import Adapter
from ..models import NewWeights, WeightSource
from ..plugins import PluginManager
from ..sampling.bad_words import BadWords
from ..sampling.history import TokenHistory, needs_history
from ..sampling.processors import LogitsProcessors
from ..sampling.seeds import UnseededStream, resolve_seed
from ..structured import GrammarCompiler, GrammarState
from .args import EngineArgs
from .assemble import Engine, assemble
from .delivery import OutputMaker, RequestGroup
from .media import MediaPolicy
from .outputs import RequestOutput
from .params import RequestOutputKind, SamplingParams
from .prompts import TokenizedPrompt, check_prompt, tokenize, tokenizing, truncate
from .shadow import Shadow
from .updating import UpdateMode, WeightsLostError, WeightUpdate, WeightUpdater, check_mode

logger = logging.getLogger(__name__)


class LLMEngine:
    """Continuous batching behind ``add_request``, ``step`` and ``abort_request``."""

    def __init__(self, args: EngineArgs, manager: PluginManager | None = None) -> None:
        self._start(args, assemble(args, manager))

    @classmethod
    def from_parts(cls, args: EngineArgs, engine: Engine) -> LLMEngine:
        """Around what :func:`assemble` made of ``args``."""
        made = cls.__new__(cls)
        made._start(args, engine)
        return made

    def _start(self, args: EngineArgs, engine: Engine) -> None:
        self.args = args
        self._ranks = engine.ranks
        self.core = engine.core
        self.target: TargetInfo = engine.target
        self.tokenizer = engine.tokenizer
        self.door = engine.door
        self.method = engine.method
        self.memory = engine.memory
        self.adapters = engine.adapters  #: None without enable_lora
        self.plugins = engine.manager
        self._eos_ids = engine.eos_ids
        self._defaults = engine.defaults
        self._rule = engine.core.verification.rule
        self._outputs = OutputMaker(self.tokenizer, self._rule.mark)
        self._unseeded = UnseededStream(args.seed)
        self._bad_words = functools.lru_cache(
            functools.partial(_bad_words, self.tokenizer, self.target.vocab_size)
        )
        self._grammars = GrammarCompiler(
            self.tokenizer, self.target.vocab_size, self._eos_ids, args.structured_outputs_config
        )
        self._shadow = Shadow(args.shadow_rate, self.core, self.build_request) if args.shadow_rate else None
        self._updater = WeightUpdater(self.core, engine.files, engine.handle)
        self._lost: WeightsLostError | None = None
        self._groups: dict[str, RequestGroup] = {}
        self._group_of: dict[Request, RequestGroup] = {}
        self._serial = count()
        self._handed_back: list[RequestOutput] = []

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
        self.check_structure(params)
        tokenized = tokenize(prompt, self.tokenizer, door=self.door, where=where)
        tokenized = truncate(tokenized, params.truncate_prompt_tokens, self.target.max_model_len, where=where)
        check_prompt(tokenized, self.target.vocab_size, self.target.max_model_len, where=where)
        return tokenized

    def check_structure(self, params: SamplingParams) -> None:
        """Compile the structure that is asked for, if any is, and keep it.

        Raises:
            ConfigError: it cannot be kept to.
        """
        if params.structure is None:
            return
        if self._rule.synthetic is not None:
            raise ConfigError(
                "structured_outputs cannot be kept under rejection_sample_method='synthetic', which "
                "accepts drafts whatever their tokens: use another rule, or leave structured_outputs out"
            )
        self._grammars.check(params.structure)

    def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
        **refused: Any,
    ) -> None:
        """Queue a request of ``params.n`` completions, as ``params`` are now.

        Args:
            priority: under ``scheduling_policy="priority"`` lower ones are admitted first and
                preempted last; equal ones in the order they come.
            lora_request: the adapter to answer with; None: the model as it is.

        Raises:
            ConfigError: the prompt, the parameters, the priority or the adapter cannot be served, or the id
                is in use.
        """
        self.check_priority(priority)
        if foreign := {name: value for name, value in refused.items() if value is not None}:
            raise ConfigError(
                *(f"{name}={value!r} is refused: it is not built yet" for name, value in foreign.items())
            )
        if request_id in self._groups:
            raise ConfigError(
                f"request_id {request_id!r} is in use: choose another, or wait until it has ended"
            )
        self.adapter_of(lora_request)
        tokenized = prompt if isinstance(prompt, TokenizedPrompt) else self.prepare(prompt, params)
        self._add(request_id, tokenized, params.snapshot(), priority, lora_request)

    def adapter_of(self, lora_request: Any, where: str = "lora_request") -> Adapter | None:
        """The adapter that a request asks for, checked; None if it asks for none. For any thread.

        Args:
            where: what messages call it.

        Raises:
            ConfigError: it cannot be served, or none can.
        """
        if lora_request is None:
            return None
        if self.adapters is None:
            raise ConfigError(
                f"{where} wants an engine with room for adapters: start it with enable_lora=True"
            )
        return self.adapters.adapter_of(lora_request, where)

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Check an adapter before a request asks for it; True.

        Raises:
            ConfigError: it cannot be served.
        """
        return self.adapter_of(lora_request) is not None

    def check_priority(self, priority: Any, where: str = "priority") -> None:
        """Raise ConfigError if it is no integer, or not 0 although nobody looks at it."""
        if not isinstance(priority, int) or isinstance(priority, bool):
            raise ConfigError(f"{where} must be an integer, got {priority!r}")
        if priority and self.args.scheduling_policy != "priority":
            raise ConfigError(
                f"{where}={priority} has no effect with scheduling_policy={self.args.scheduling_policy!r}: "
                "set scheduling_policy='priority', or leave it out"
            )

    def _add(self, *request: Any) -> None:
        """Queue a checked request, on all ranks; arguments as of :meth:`queue`."""
        self._ranks.announce("queue", *request)
        self.queue(*request)

    def queue(
        self,
        request_id: str,
        prompt: TokenizedPrompt,
        params: SamplingParams,
        priority: int,
        lora_request: LoRARequest | None = None,
    ) -> None:
        """Queue a checked request on this rank."""
        adapter = self.adapter_of(lora_request)
        group = RequestGroup(request_id, prompt, params, lora_request)
        seed = resolve_seed(params.seed, self._unseeded)
        self._check_weights()
        requests: list[Request] = []  # all are made before the first is queued: making one may raise
        for index in range(params.n):
            name = f"{request_id}/{index}#{next(self._serial)}"
            leader = requests[0] if requests else None
            request = self.build_request(name, prompt, params, seed=seed, index=index, leader=leader)
            request.priority, request.adapter = priority, adapter
            requests.append(request)
        self._groups[request_id] = group
        try:
            for request in requests:
                self.core.add(request)
                group.states.append(self.core.outputs[request])
                self._group_of[request] = group
        except BaseException:  # a tokenizer's, asked about the prompt's last tokens
            self.abort_request(request_id)
            raise

    def build_request(
        self,
        name: str,
        prompt: TokenizedPrompt,
        params: SamplingParams,
        *,
        seed: int,
        index: int = 0,
        leader: Request | None = None,
    ) -> Request:
        """One completion as the engine works on it, not queued.

        Args:
            seed: keys its noise; from :func:`~specdecode.sampling.resolve_seed`.
            index: which completion of the prompt.
            leader: completion 0, whose prompt it waits for.
        """
        longest = self.target.max_model_len
        wanted = longest if params.max_tokens is None else len(prompt.token_ids) + params.max_tokens
        eos_ids = frozenset() if params.ignore_eos else self._eos_ids
        return Request(
            id=name,
            prompt_ids=prompt.token_ids,
            params=params,
            seed=seed,
            index=index,
            namespace=prompt.cache_salt,
            limit=min(longest, wanted),
            eos_ids=eos_ids,
            stop_ids=tuple(sorted({*eos_ids, *params.stop_token_ids})),
            images=prompt.images,
            leader=leader,
            history=TokenHistory(prompt.token_ids) if needs_history(params) else None,
            bad_words=self._bad_words(params.bad_words or ()),
            processors=LogitsProcessors(params.logits_processors, prompt.token_ids)
            if params.logits_processors
            else None,
            grammar=self._grammar(params, eos_ids),
            prompt_logprobs=params.prompt_logprobs if leader is None else None,
        )

    def _grammar(self, params: SamplingParams, eos_ids: frozenset[int]) -> GrammarState | None:
        if params.structure is None:
            return None
        stops = {*eos_ids, *params.stop_token_ids}
        return self._grammars.start(params.structure, may_stop=not stops.isdisjoint(self._eos_ids))

    def abort_request(self, request_id: str | Sequence[str]) -> list[RequestOutput]:
        """End requests now, and return their last outputs; unknown and ended ones are passed over."""
        names = [request_id] if isinstance(request_id, str) else list(request_id)
        self._ranks.announce_if_alive("abort_request", names)
        outputs: list[RequestOutput] = []
        for name in names:
            group = self._groups.pop(name, None)
            if group is None:
                continue
            for state in group.states:
                self.core.abort(state.request)
                self._group_of.pop(state.request, None)
            if len(group.states) == group.params.n:  # else it was never queued as a whole
                outputs.append(self._outputs.output(group, finished=True))
        return outputs

    def has_request(self, request_id: str) -> bool:
        """Whether a request of that id runs or waits."""
        return request_id in self._groups

    def has_unfinished_requests(self) -> bool:
        return bool(self._groups or self._handed_back) or self.core.has_unfinished or self.has_shadow_work

    @property
    def has_shadow_work(self) -> bool:
        """Whether finished completions are still to be checked, as ``shadow_rate`` asks for."""
        return self._shadow is not None and self._shadow.pending

    def get_num_unfinished_requests(self) -> int:
        return len(self._groups)

    # -- steps ----------------------------------------------------------------------------------
    def step(self) -> list[RequestOutput]:
        """Run one step; outputs of the requests it gave something to, as their ``output_kind`` says.

        What the model or the device raises (out of memory, say) is passed on with no request
        changed: call it again, or abort requests first. Under tensor parallelism that ends the engine:
        nobody knows how far the other ranks came.

        Raises:
            WorkerDied: another rank's process has ended; every further call raises it too.
        """
        touched: dict[str, RequestGroup] = {}
        if self._ranks.group.size > 1:
            self._ranks.announce("step", self.trace())
        with self._ranks.together():
            states = self._step()
        for state in states:
            group = self._group_of.get(state.request)
            if group is not None:
                touched[group.request_id] = group
        outputs = [output for group in touched.values() for output in self._emit(group)]
        back, self._handed_back = self._handed_back, []
        return [*back, *outputs]

    def hand_back(self, outputs: Sequence[RequestOutput]) -> None:
        """Have the next :meth:`step` return ``outputs``, which are somebody else's than its caller's."""
        self._handed_back += outputs

    def _step(self) -> list[RequestOutputState]:
        self._check_weights()
        shadow = self._shadow
        if shadow is None:
            return self.core.step()
        shadow.before_step()
        states = [state for state in self.core.step() if not shadow.take(state)]
        shadow.after_step()
        return states

    def _emit(self, group: RequestGroup) -> Iterator[RequestOutput]:
        finished = group.finished
        if finished:
            del self._groups[group.request_id]
            for state in group.states:
                self._group_of.pop(state.request, None)
                if self._shadow is not None and group.repeatable:
                    self._shadow.offer(group.request_id, group.prompt, group.params, state)
        if finished or group.params.output_kind is not RequestOutputKind.FINAL_ONLY:
            yield self._outputs.output(group, finished)

    # -- new weights ----------------------------------------------------------------------------
    def update_weights(self, source: WeightSource, *, mode: UpdateMode = "wait") -> WeightUpdate:
        """Replace the model's weights in place; what is cached of the old ones is dropped.

        Either all weights are replaced or, with an error, none. The draft method refreshes what it made of
        the target's weights (:meth:`Proposer.on_target_updated`); what it remembers of past texts stays.

        Args:
            source: a checkpoint of the same shape: a directory, hub id or ``.gguf`` file; or all of its
                tensors, as a mapping or an iterable of ``(name, tensor)``.
            mode: "wait" finishes first what runs or waits, and :meth:`step` hands it out; "abort" ends it;
                "keep" computes it again from its tokens, and goes on with the new weights.

        Raises:
            ConfigError: ``source`` does not fit the model, or there is no such mode; nothing was changed.
            WeightsLostError: reading failed in the middle; the engine serves nobody any more.
        """
        check_mode(mode)
        new = self.find_weights(source)
        if mode == "wait":
            while self._groups:
                self.hand_back(self.step())
        elif mode == "abort":
            self.hand_back(self.abort_request(list(self._groups)))
        return self.apply_weights(new)

    def find_weights(self, source: WeightSource) -> NewWeights:
        """The first half of :meth:`update_weights`: reads and checks, in any thread, while steps are taken.

        Raises:
            ConfigError: ``source`` does not fit the model.
        """
        self._check_weights()
        new = self._updater.find(source)
        if new.path is None and self._ranks.group.size > 1:
            raise ConfigError(
                f"weights given as tensors are refused under tensor_parallel_size={self._ranks.group.size}, "
                "where each process reads its share: write them to a directory and give its path"
            )
        return new

    def apply_weights(self, new: NewWeights) -> WeightUpdate:
        """The second half: between two steps. Requests that are there are kept.

        Raises:
            WeightsLostError: reading failed in the middle; the engine serves nobody any more.
        """
        self._check_weights()
        self._ranks.announce("take_weights", new.path)
        return self._take(new)

    def take_weights(self, path: str) -> None:
        """What the other ranks do meanwhile: each finds its own share."""
        self._take(self.find_weights(path))

    def _take(self, new: NewWeights) -> WeightUpdate:
        if self._shadow is not None:
            self._shadow.forget()  # it would decode them by other weights
        for group in self._groups.values():
            group.repeatable = False
        with self._ranks.together():
            try:
                return self._updater.apply(new)
            except WeightsLostError as error:
                self._lost = error
                raise

    def _check_weights(self) -> None:
        if self._lost is not None:
            raise self._lost

    # -- the rest -------------------------------------------------------------------------------
    @property
    def media(self) -> MediaPolicy | None:
        """Which images conversations may name; None: the model takes text only."""
        if self.door is None:
            return None
        return MediaPolicy(
            image_token=self.door.preprocessor.image_token,
            local_path=self.args.allowed_local_media_path,
            domains=self.args.allowed_media_domains,
        )

    def get_tokenizer(self) -> Any:
        """The model's transformers tokenizer; None under ``skip_tokenizer_init``."""
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation config asks for."""
        return SamplingParams(**self._defaults)

    def get_metrics(self) -> list[Metric]:
        return self.core.read_metrics()

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; False while requests run."""
        self._ranks.announce("reset_prefix_cache")
        return self.core.scheduler.pool.reset_cache()

    def forget_requests(self) -> bool:
        """Forget cached prefixes, and what ``adaptive`` learned; False while requests run."""
        self._ranks.announce("forget_requests")
        if not self.core.scheduler.pool.reset_cache():
            return False
        self.core.forget_learned()
        return True

    def shutdown(self) -> None:
        """End all requests and free proposer, KV and model. May be called twice."""
        if self._shadow is not None:
            self._shadow.forget()
        self.core.close()
        self._groups.clear()
        self._group_of.clear()
        self._ranks.close()

    # -- ranks ----------------------------------------------------------------------------------
    @property
    def rank(self) -> int:
        """Of this engine among those that share the model; the others do what rank 0 does."""
        return self._ranks.group.rank

    @property
    def worker_pids(self) -> Sequence[int]:
        """The processes of the other ranks, in their order; empty for one rank."""
        return self._ranks.pids

    def trace(self) -> tuple[int, int]:
        """What all ranks must agree on before a step: requests that run, and a digest of their state."""
        running = self.core.scheduler.running
        state = [
            (
                request.id,
                request.computed,
                len(request.token_ids),
                request.token_ids[-4:],
                *request.drafts.ids,
            )
            for request in running
        ]
        waiting = [request.id for request in self.core.scheduler.waiting]
        free = self.core.scheduler.pool.num_free
        return len(running), zlib.crc32(repr((state, waiting, free)).encode())


def _bad_words(tokenizer: Any, vocab_size: int, words: tuple[str, ...]) -> BadWords | None:
    if not words:
        return None

    def encode(word: str) -> list[int]:
        with tokenizing(f"bad_words {word!r}"):
            return list(tokenizer.encode(word, add_special_tokens=False))

    return BadWords.of(words, encode, vocab_size)
