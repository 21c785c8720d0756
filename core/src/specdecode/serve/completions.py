"""``/v1/completions``."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

import attrs

from ..api.outputs import CompletionOutput, RequestOutput
from ..api.params import SamplingParams
from ..api.prompts import TokenizedPrompt
from ..contract import ConfigError
from .choices import Sources, finish_of
from .errors import ApiError
from .job import Job
from .logprobs import CompletionLogprobs, Row
from .protocol import CompletionRequest
from .sampling import completion_params, prompt_alone
from .structure import structure_of

OBJECT = "text_completion"


def prompts_of(body: CompletionRequest) -> list[dict[str, Any]]:
    """One prompt or a list of them, each as text or token ids."""
    given = body.prompt
    if isinstance(given, str):
        return [{"prompt": given}]
    if not given:
        raise ApiError(400, "prompt is an empty list: give at least one prompt", param="prompt")
    if isinstance(given[0], int):
        return [{"prompt_token_ids": given}]
    return [{"prompt": one} if isinstance(one, str) else {"prompt_token_ids": one} for one in given]


@attrs.define
class Choice:
    """One completion as it goes on."""

    index: int  #: among all of the request's
    prompt: TokenizedPrompt
    params: SamplingParams
    echo: str | None  #: text of the prompt, to be given before the first piece
    sources: Sources | None
    logprobs: CompletionLogprobs | None
    done: bool = False

    def take(
        self, completion: CompletionOutput, output: RequestOutput, prompt_rows: Sequence[Row | None]
    ) -> dict[str, Any]:
        """The choice in a chunk, with what ``completion`` adds; ``prompt_rows``: of the prompt's tokens."""
        text = completion.text
        token_ids: list[int] = list(completion.token_ids)
        rows: list[Any] = list(completion.logprobs or ())
        self.done = completion.finished()
        if self.echo is not None:
            text, self.echo = self.echo + text, None
            if self.logprobs is not None:
                token_ids = [*output.prompt_token_ids, *token_ids]
                missing = len(output.prompt_token_ids) - len(prompt_rows)  # it ended within the prompt
                rows = [*prompt_rows, *[None] * missing, *rows]
        choice: dict[str, Any] = {
            "index": self.index,
            "text": text,
            "logprobs": self.logprobs.take(token_ids, rows) if self.logprobs else None,
            **finish_of(completion),
        }
        if self.sources is not None:
            choice["token_sources"] = self.sources.take(completion)
        return choice


class Completion:
    """Answers one request."""

    def __init__(self, job: Job, body: CompletionRequest) -> None:
        self._job = job
        self._body = body

    async def begin(self) -> None:
        """Check and queue it.

        Raises:
            ApiError, ConfigError: it cannot be served.
        """
        job, body, llm = self._job, self._body, self._job.service.llm
        given = prompts_of(body)
        job.check_count(len(given))
        if llm.get_tokenizer() is None:
            for field in ("echo", "token_sources"):
                if getattr(body, field):
                    raise ConfigError(f"{field} wants a tokenizer and skip_tokenizer_init=True left none")
        params = completion_params(body, llm.get_default_sampling_params(), structure_of(body))
        prompts = [
            await llm.prepare(job.salted(prompt), params, where=f"prompt[{i}]" if i else "prompt")
            for i, prompt in enumerate(given)
        ]
        self._choices = list(self._make_choices(prompts, params))
        await job.queue(prompts, params)

    def _make_choices(self, prompts: Sequence[TokenizedPrompt], params: SamplingParams) -> Iterator[Choice]:
        tokenizer = self._job.service.llm.get_tokenizer()
        for prompt in prompts:
            echo = self._echoed(prompt) if self._body.echo else None
            for index in range(params.n):
                yield Choice(
                    index=index,
                    prompt=prompt,
                    params=params,
                    echo=echo,
                    sources=Sources(tokenizer, prompt.token_ids) if self._body.token_sources else None,
                    logprobs=None
                    if params.logprobs is None
                    else CompletionLogprobs(params.logprobs, tokenizer),
                )

    def _echoed(self, prompt: TokenizedPrompt) -> str:
        """The text of the prompt that is served, which may be the end of the one that was sent."""
        if prompt.text is None or prompt.cut:
            return str(self._job.service.llm.get_tokenizer().decode(list(prompt.token_ids)))
        return prompt.text

    async def _pieces(self) -> AsyncGenerator[dict[str, Any], None]:
        """Choices with what each output adds."""
        n = self._body.n
        for index, choice in enumerate(self._choices):
            choice.index = index
        prompt_rows: dict[int, Sequence[Row | None]] = {}  # a stream tells them once, whichever choice begins
        trim = _without_completions if prompt_alone(self._body) else None
        async for number, output in self._job.outputs(trim):
            if output.prompt_logprobs is not None:
                prompt_rows[number] = output.prompt_logprobs
            for completion in output.outputs:
                choice = self._choices[number * n + completion.index]
                if choice.done:
                    continue
                if completion.finished() or completion.text or completion.logprobs:
                    if completion.finished():
                        self._job.finish_reasons[number, completion.index] = str(completion.finish_reason)
                    yield choice.take(completion, output, prompt_rows.get(number, ()))

    async def whole(self) -> dict[str, Any]:
        """The response."""
        choices = [piece async for piece in self._pieces()]
        head = self._job.head(OBJECT)
        return {**head, "choices": sorted(choices, key=lambda c: c["index"]), "usage": self._job.usage.body()}

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """The chunks of a stream, without usage."""
        head = self._job.head(OBJECT)
        async for piece in self._pieces():
            yield {**head, "choices": [piece]}


def _without_completions(output: RequestOutput) -> RequestOutput:
    """``output`` of a request of which the prompt alone is told; what went wrong with it is told as well."""
    empty = [
        attrs.evolve(
            completion,
            text="",
            token_ids=(),
            cumulative_logprob=None,
            logprobs=None,
            token_sources=(),
            finish_reason="length" if completion.finish_reason == "stop" else completion.finish_reason,
            stop_reason=None,
        )
        for completion in output.outputs
    ]
    return attrs.evolve(output, outputs=empty)
