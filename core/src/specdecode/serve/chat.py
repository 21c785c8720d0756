"""``/v1/chat/completions``."""

from __future__ import annotations

import functools
import uuid
from collections.abc import AsyncGenerator
from typing import Any

import attrs

from ..api.chat import ChatOptions, chat_prompt
from ..api.door import is_long
from ..api.outputs import CompletionOutput
from ..api.params import SamplingParams
from ..api.prompts import TokenizedPrompt
from ..contract import ConfigError
from .choices import Sources, finish_of
from .job import Job
from .logprobs import chat_logprobs
from .parsers import REASONING_PARSERS, TOOL_PARSERS, AnswerParser, Delta, ReasoningFormat, ToolFormat
from .protocol import ChatRequest
from .sampling import chat_params
from .structure import behind_reasoning, called_tools, calling, structure_of

#: How calls look that a request asks for, where the server was not told how its model writes them.
CALLS_BY_GRAMMAR = TOOL_PARSERS["json"]


@attrs.define
class Choice:
    """One answer as it goes on."""

    index: int
    parser: AnswerParser
    tokenizer: Any
    top_logprobs: int
    include_reasoning: bool
    sources: Sources | None
    num_calls: int = 0
    done: bool = False

    def take(self, completion: CompletionOutput) -> tuple[Delta, dict[str, Any]]:
        """What ``completion`` adds: to the message, and to the choice around it."""
        self.done = completion.finished()
        delta = self.parser.feed(completion.text, last=self.done)
        if not self.include_reasoning:
            delta.reasoning = ""
        self.num_calls += len(delta.calls)
        around = {
            "index": self.index,
            "logprobs": chat_logprobs(
                self.tokenizer, completion.token_ids, completion.logprobs, self.top_logprobs
            ),
            **finish_of(completion),
        }
        if self.num_calls and completion.finish_reason == "stop":
            around["finish_reason"] = "tool_calls"
        if self.sources is not None:
            around["token_sources"] = self.sources.take(completion)
        return delta, around

    def message(self, delta: Delta, *, streamed: bool) -> dict[str, Any]:
        """``delta`` as the API has it."""
        message: dict[str, Any] = {}
        if not streamed:
            message = {"role": "assistant", "content": delta.content or (None if delta.calls else "")}
        elif delta.content:
            message["content"] = delta.content
        if delta.reasoning:
            message["reasoning_content"] = delta.reasoning
        first = self.num_calls - len(delta.calls)
        if delta.calls:
            message["tool_calls"] = [
                {
                    **({"index": first + number} if streamed else {}),
                    "id": f"call_{uuid.uuid4().hex[:24]}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for number, call in enumerate(delta.calls)
            ]
        return message


class Chat:
    """Answers one request."""

    def __init__(self, job: Job, body: ChatRequest) -> None:
        self._job = job
        self._body = body

    async def begin(self) -> None:
        """Check and queue it.

        Raises:
            ApiError, ConfigError: it cannot be served.
        """
        job, body, llm = self._job, self._body, self._job.service.llm
        job.check_count(1)
        settings = job.service.settings
        reasoning = REASONING_PARSERS.get(settings.reasoning_parser or "")
        tools = self._tool_format()
        options = self._options()
        media = llm.facts.media
        rendered = await llm.at_the_door(
            lambda: chat_prompt(llm.get_tokenizer(), body.messages, options, media=media),
            long=is_long([body.messages, options.tools]),
        )
        text = rendered.get("prompt", "")
        structure = self._structure(tools)
        if structure is not None and reasoning is not None:
            structure = await llm.at_the_door(  # a grammar is translated for that
                functools.partial(behind_reasoning, structure, reasoning, text), long=True
            )
        params = chat_params(body, llm.get_default_sampling_params(), structure)
        prompt = await llm.prepare(job.salted(rendered), params, where="messages")
        self._make_choices(prompt, params, reasoning, tools)
        await job.queue([prompt], params)

    def _make_choices(
        self,
        prompt: TokenizedPrompt,
        params: SamplingParams,
        reasoning: ReasoningFormat | None,
        tools: ToolFormat | None,
    ) -> None:
        tokenizer = self._job.service.llm.get_tokenizer()
        self._choices = [
            Choice(
                index=index,
                parser=AnswerParser(prompt.text or "", reasoning, tools),
                tokenizer=tokenizer,
                top_logprobs=params.logprobs or 0,
                include_reasoning=self._body.include_reasoning,
                sources=Sources(tokenizer, prompt.token_ids) if self._body.token_sources else None,
            )
            for index in range(params.n)
        ]

    def _tool_format(self) -> ToolFormat | None:
        """How calls are to be read from the answer; None: there are none."""
        if not self._body.tools or self._body.tool_choice == "none":
            return None
        format = TOOL_PARSERS.get(self._job.service.settings.tool_call_parser or "")
        return format or (CALLS_BY_GRAMMAR if called_tools(self._body) else None)

    def _options(self) -> ChatOptions:
        body = self._body
        told = body.tools if body.tool_choice != "none" else None
        add = body.add_generation_prompt
        more: dict[str, Any] = dict(body.chat_template_kwargs or {})
        if body.reasoning_effort is not None:
            more.setdefault("reasoning_effort", body.reasoning_effort)
        return ChatOptions(
            chat_template=self._job.service.settings.chat_template,
            add_generation_prompt=not body.continue_final_message if add is None else add,
            continue_final_message=body.continue_final_message,
            tools=[tool.model_dump(exclude_none=True) for tool in told] if told else None,
            template_kwargs=more,
        )

    def _structure(self, tools: ToolFormat | None) -> dict[str, Any] | None:
        structure = structure_of(self._body)
        if called := called_tools(self._body):
            if structure is not None:
                raise ConfigError("tool_choice asks for calls and another field for a structure: keep one")
            assert tools is not None
            structure = calling(tools, called, several=self._body.parallel_tool_calls)
        return structure

    async def _deltas(self) -> AsyncGenerator[tuple[Choice, Delta, dict[str, Any]], None]:
        async for _, output in self._job.outputs():
            for completion in output.outputs:
                choice = self._choices[completion.index]
                if choice.done:
                    continue
                if completion.finished():
                    self._job.finish_reasons[0, completion.index] = str(completion.finish_reason)
                yield choice, *choice.take(completion)

    async def whole(self) -> dict[str, Any]:
        """The response."""
        choices = [
            {**around, "message": choice.message(delta, streamed=False)}
            async for choice, delta, around in self._deltas()
        ]
        head = self._job.head("chat.completion")
        return {**head, "choices": sorted(choices, key=lambda c: c["index"]), "usage": self._job.usage.body()}

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """The chunks of a stream, without usage."""
        head = self._job.head("chat.completion.chunk")
        for choice in self._choices:
            first = {"role": "assistant", "content": ""}
            yield {
                **head,
                "choices": [{"index": choice.index, "delta": first, "logprobs": None, "finish_reason": None}],
            }
        async for choice, delta, around in self._deltas():
            told = around["logprobs"] and around["logprobs"]["content"]
            if delta or choice.done or told or around.get("token_sources"):
                yield {**head, "choices": [{**around, "delta": choice.message(delta, streamed=True)}]}
