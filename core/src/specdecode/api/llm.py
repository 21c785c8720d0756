"""LLM: offline generation, as in vLLM."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from ..contract import ConfigError, SpecdecodeError
from ..engine.advice import Advisor, SpeculationFigures
from ..engine.metrics import Metric
from ..lora.request import LoRARequest
from ..models import WeightSource
from ..plugins.records import MethodRecord
from .args import EngineArgs
from .chat import ChatOptions, chat_prompts
from .engine import LLMEngine
from .interrupts import Check, held_back_interrupts
from .memory import MemoryPlan
from .not_offered import MEMBERS, argument_faults
from .outputs import RequestOutput
from .params import RequestOutputKind, SamplingParams
from .updating import UpdateMode, WeightUpdate


class LLM:
    """A model, ready to generate.

    Args:
        model: Hugging Face directory or hub id (from the offline cache), or a ``.gguf`` file.
        speculative_config: how to speculate: ``{"method": ..., ...}``, a JSON string or a
            ``SpeculativeConfig``. Output does not depend on it.
        keywords: see :class:`EngineArgs`.

    Raises:
        ConfigError: every unknown or wrong argument, each with the remedy.
        Unsupported: a combination this version cannot serve.
    """

    def __init__(self, model: str, *, speculative_config: Any = None, **keywords: Any) -> None:
        args = EngineArgs.of({"model": model, "speculative_config": speculative_config, **keywords})
        self.llm_engine = LLMEngine(args)
        self._ids = count()
        drafting = self.llm_engine.core.drafting
        self._advisor = Advisor(adaptive=drafting is not None and drafting.policy.pacer is not None)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> LLM:
        """Build from arguments.

        Raises:
            ConfigError: see :meth:`EngineArgs.of`.
        """
        return cls(**vars(engine_args))

    if not TYPE_CHECKING:  # else every misspelt attribute would pass

        def __getattr__(self, name: str) -> Any:
            why = f" is not offered: {MEMBERS[name]}" if name in MEMBERS else " is no attribute"
            raise AttributeError(f"{type(self).__name__}.{name}{why}", name=name, obj=self)

    def generate(
        self,
        prompts: Any = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        prompt_token_ids: Any = None,
        use_tqdm: bool | Callable[..., tqdm] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        prompt_adapter_request: Any = None,
        logits_processor: Any = None,
        *,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Complete ``prompts``; outputs in their order.

        Args:
            prompts: a string, ``TextPrompt``, ``TokensPrompt`` or list of token ids, or a list of them.
            sampling_params: for all prompts, or one for each; None: the model's defaults.
            prompt_token_ids: token ids instead of ``prompts``: one list, or a list of lists.
            use_tqdm: show progress, with tokens per second and acceptance length; a callable makes the bar.
            lora_request: the adapter to answer with, for all prompts or one for each; None: none.
            logits_processor: a callable or a list of them, for all requests of this call, before
                their own ``logits_processors``.
            priority: of all prompts, or one for each, under ``scheduling_policy="priority"``: lower ones
                are served first.
            tokenization_kwargs, mm_processor_kwargs: refused, with what to do instead.

        Whatever is raised, a KeyboardInterrupt included, ends the requests of this call and leaves
        the engine ready for the next one. What concerns one request only, like a logits processor
        that raises, ends that one with ``finish_reason="error"``.

        Raises:
            ConfigError: any prompt or parameter that cannot be served; then nothing was generated.
            SpecdecodeError: a request of this call was aborted by somebody else.
        """
        from .prompts import listed

        faults = argument_faults(
            tokenization_kwargs=tokenization_kwargs, mm_processor_kwargs=mm_processor_kwargs
        )
        if prompt_adapter_request is not None:
            faults.append("prompt_adapter_request is refused: it is not built yet")
        if faults:
            raise ConfigError(*faults)
        items = listed(prompts, prompt_token_ids)
        params = [self._final(wish, logits_processor) for wish in self._params_of(items, sampling_params)]
        engine = self.llm_engine
        priorities = self._priorities_of(items, priority)
        adapters = self._adapters_of(items, lora_request)
        tokenized = [
            engine.prepare(item, wish, where=f"prompts[{index}]")
            for index, (item, wish) in enumerate(zip(items, params, strict=True))
        ]
        order: dict[str, int] = {}
        strangers: list[RequestOutput] = []  # of requests that somebody else runs on the same engine
        with held_back_interrupts() as check_interrupt:
            try:
                for prompt, wish, rank, adapter in zip(tokenized, params, priorities, adapters, strict=True):
                    request_id = self._free_id()
                    order[request_id] = len(order)
                    engine.add_request(request_id, prompt, wish, priority=rank, lora_request=adapter)
                outputs = self._run(order, strangers, use_tqdm, check_interrupt)
            except BaseException:
                engine.abort_request(list(order))
                raise
            finally:
                engine.hand_back(strangers)
        return sorted(outputs, key=lambda output: order[output.request_id])

    def chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., tqdm] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: Any = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer ``messages``, put into the chat template; one output a conversation, in their order.

        Args:
            messages: a conversation, which is a list of ``{"role": ..., "content": ...}``, or a list of
                conversations. Content is a text or a list of parts: text, and images where the model
                takes them.
            sampling_params: for all conversations, or one for each; None: the model's defaults.
            use_tqdm, lora_request: as in :meth:`generate`.
            chat_template: Jinja text; None: the tokenizer's own.
            chat_template_content_format: what the template is given: "string" (parts joined by
                newlines), "openai" (a list of parts), or "auto" (as the template looks).
            add_generation_prompt: begin the assistant's message.
            continue_final_message: go on with the last message instead of beginning one.
            tools: JSON schemas or functions, told to the template.
            chat_template_kwargs: further variables of the template.
            tokenization_kwargs, mm_processor_kwargs: refused, with what to do instead.

        Raises:
            ConfigError: a message, option or parameter that cannot be served; then nothing was generated.
        """
        if faults := argument_faults(
            tokenization_kwargs=tokenization_kwargs, mm_processor_kwargs=mm_processor_kwargs
        ):
            raise ConfigError(*faults)
        options = ChatOptions(
            chat_template=chat_template,
            content_format=chat_template_content_format,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_kwargs=chat_template_kwargs or {},
        )
        prompts = chat_prompts(self.get_tokenizer(), messages, options, self.llm_engine.media)
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request)

    def _priorities_of(self, items: Sequence[Any], priority: int | Sequence[int] | None) -> list[int]:
        if priority is None:
            return [0] * len(items)
        ranks = [priority] * len(items) if isinstance(priority, int) else list(priority)
        if len(ranks) != len(items):
            raise ConfigError(
                f"priority has {len(ranks)} entries for {len(items)} prompts: give one for each"
            )
        for index, rank in enumerate(ranks):
            self.llm_engine.check_priority(rank, f"priority[{index}]")
        return ranks

    def _adapters_of(self, items: Sequence[Any], lora_request: Any) -> list[LoRARequest | None]:
        if not isinstance(lora_request, Sequence) or isinstance(lora_request, str):
            self.llm_engine.adapter_of(lora_request)
            one: Any = lora_request
            return [one] * len(items)
        if len(lora_request) != len(items):
            raise ConfigError(
                f"lora_request has {len(lora_request)} entries for {len(items)} prompts: give one for each"
            )
        for index, own in enumerate(lora_request):
            self.llm_engine.adapter_of(own, f"lora_request[{index}]")
        return list(lora_request)

    def _params_of(self, items: Sequence[Any], params: Any) -> list[SamplingParams]:
        if params is None:
            params = self.get_default_sampling_params()
        if isinstance(params, SamplingParams):
            return [params] * len(items)
        if not isinstance(params, Sequence) or len(params) != len(items):
            raise ConfigError(
                f"sampling_params must be one SamplingParams, or one for each of the {len(items)} prompts, "
                f"got {len(params) if isinstance(params, Sequence) else repr(params)}"
            )
        return list(params)

    @staticmethod
    def _final(params: Any, logits_processor: Any) -> Any:
        """``params`` for outputs at the end only, ``logits_processor`` put before those they have."""
        if not isinstance(params, SamplingParams):
            return params  # refused by name when it is prepared
        first = () if logits_processor is None else logits_processor
        if not isinstance(first, Sequence):
            first = [first]
        processors = [*first, *(params.logits_processors or ())] or None
        return params.clone(output_kind=RequestOutputKind.FINAL_ONLY, logits_processors=processors)

    def _free_id(self) -> str:
        """A request id that nobody who drives ``llm_engine`` beside this has in use."""
        return next(name for name in map(str, self._ids) if not self.llm_engine.has_request(name))

    def _run(
        self,
        order: dict[str, int],
        strangers: list[RequestOutput],
        use_tqdm: bool | Callable[..., tqdm],
        check_interrupt: Check,
    ) -> list[RequestOutput]:
        """Step until all of ``order`` have finished; outputs of others go to ``strangers``."""
        outputs: list[RequestOutput] = []
        bar = use_tqdm if callable(use_tqdm) else functools.partial(tqdm, disable=not use_tqdm)
        progress = bar(total=len(order), desc="Generating", unit="prompt", dynamic_ncols=True)
        metrics, before = self.llm_engine.core.metrics, _Progress(self)
        counted = SpeculationFigures.read(metrics)
        with progress:
            while len(outputs) < len(order):
                check_interrupt()
                if not self.llm_engine.has_unfinished_requests():
                    gone = len(order) - len(outputs)
                    raise SpecdecodeError(f"{gone} of {len(order)} requests were aborted while they ran")
                given = self.llm_engine.step()
                finished = [output for output in given if output.request_id in order]
                strangers += [output for output in given if output.request_id not in order]
                outputs.extend(finished)
                if finished and use_tqdm:
                    progress.set_postfix_str(
                        before.describe(metrics, progress.format_dict["elapsed"]), refresh=False
                    )
                    progress.update(len(finished))
        self._advisor.tell(SpeculationFigures.read(metrics) - counted)
        while self.llm_engine.has_shadow_work and not self.llm_engine.get_num_unfinished_requests():
            check_interrupt()
            self.llm_engine.step()
        return outputs

    # -- looking in -----------------------------------------------------------------------------
    def get_metrics(self) -> list[Metric]:
        """Counters, gauges, histograms and vectors since the engine started; see ``docs/metrics.md``."""
        return self.llm_engine.get_metrics()

    def get_tokenizer(self) -> Any:
        """The model's transformers tokenizer; None under ``skip_tokenizer_init``."""
        return self.llm_engine.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        return self.llm_engine.get_default_sampling_params()

    def memory_plan(self) -> MemoryPlan:
        """What memory is used for."""
        return self.llm_engine.memory

    def methods(self) -> list[MethodRecord]:
        """The installed draft methods."""
        return self.llm_engine.plugins.methods()

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; False while requests run."""
        return self.llm_engine.reset_prefix_cache()

    def update_weights(self, source: WeightSource, *, mode: UpdateMode = "wait") -> WeightUpdate:
        """Replace the model's weights in place; see :meth:`LLMEngine.update_weights`."""
        return self.llm_engine.update_weights(source, mode=mode)

    # -- the end --------------------------------------------------------------------------------
    def shutdown(self) -> None:
        """Free everything. May be called twice."""
        self.llm_engine.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()


class _Progress:
    """Rates since a run began, for the progress bar."""

    def __init__(self, llm: LLM) -> None:
        metrics = llm.llm_engine.core.metrics
        self._start = (metrics.generation_tokens.total, metrics.drafts.total, metrics.draft_step_tokens.total)

    def describe(self, metrics: Any, seconds: float) -> str:
        now = (metrics.generation_tokens.total, metrics.drafts.total, metrics.draft_step_tokens.total)
        tokens, drafts, draft_tokens = (
            after - before for after, before in zip(now, self._start, strict=True)
        )
        rate = f"{tokens / seconds:.1f} tokens/s" if seconds else ""
        return f"{rate}, acceptance length {draft_tokens / drafts:.2f}" if drafts else rate
