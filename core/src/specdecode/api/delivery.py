"""Requests as their users know them, and the outputs they are given."""

from __future__ import annotations

import logging
from typing import Any

import attrs

from ..engine.output import RequestOutputState
from ..lora.request import LoRARequest
from ..sampling.logprobs import RowLogprobs
from .outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from .params import RequestOutputKind, SamplingParams
from .prompts import TokenizedPrompt

logger = logging.getLogger(__name__)

#: A token id -> its log-probability.
TokenLogprobs = dict[int, Logprob]


@attrs.define(eq=False)
class RequestGroup:
    """A user's request: one prompt, ``n`` completions."""

    request_id: str
    prompt: TokenizedPrompt
    params: SamplingParams
    lora_request: LoRARequest | None = None
    states: list[RequestOutputState] = attrs.field(factory=list)
    sent: dict[int, tuple[int, int]] = attrs.field(factory=dict)  #: index -> tokens, characters given out
    logprobs: dict[int, list[TokenLogprobs]] = attrs.field(factory=dict)  #: index -> as they are given out
    prompt_logprobs: list[TokenLogprobs | None] | None = None  #: as they are given out; None: not yet
    prompt_token_ids: list[int] = attrs.Factory(  #: one list for all outputs
        lambda self: list(self.prompt.token_ids), takes_self=True
    )
    repeatable: bool = True  #: False: its tokens are of old weights and new ones

    @property
    def finished(self) -> bool:
        return all(state.finish for state in self.states)


class OutputMaker:
    """Makes the outputs of groups.

    Args:
        tokenizer: for the texts of log-probabilities' tokens; None: they have none.
        lossy: the mark of a rule of verification that is not lossless.
    """

    def __init__(self, tokenizer: Any, lossy: str | None) -> None:
        self._tokenizer, self._lossy = tokenizer, lossy
        self._textless: set[int] = set()  # tokens the tokenizer raised for

    def output(self, group: RequestGroup, finished: bool) -> RequestOutput:
        """All of it, or what came since the last one, as the request's ``output_kind`` says."""
        delta = group.params.output_kind is RequestOutputKind.DELTA
        return RequestOutput(
            request_id=group.request_id,
            prompt=group.prompt.text,
            prompt_token_ids=group.prompt_token_ids,
            outputs=[self._completion(group, state, delta) for state in group.states],
            finished=finished,
            prompt_logprobs=self._prompt_logprobs(group, delta),
            metrics=_metrics(group, lossy=self._lossy),
            num_cached_tokens=group.states[0].request.stats.cached_tokens,
            lora_request=group.lora_request,
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
        return {
            token: Logprob(value, rank, self._decoded(token))
            for token, value, rank in zip(row.token_ids, row.logprobs, row.ranks, strict=True)
        }

    def _decoded(self, token: int) -> str | None:
        """Its text; None if there is no tokenizer, or it has none for this token."""
        if self._tokenizer is None:
            return None
        try:
            return str(self._tokenizer.decode([token]))
        except Exception:  # some raise for ids that only the padded vocabulary of the model has
            if token not in self._textless:
                logger.warning("the tokenizer has no text for token %d", token, exc_info=True)
                self._textless.add(token)
            return None


def _metrics(group: RequestGroup, *, lossy: str | None) -> RequestMetrics:
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
        discarded=sum(s.discarded for s in stats),
        bonus=sum(s.bonus for s in stats),
        draft_steps=sum(s.draft_steps for s in stats),
        steps=sum(s.steps for s in stats),
        preemptions=sum(s.preemptions for s in stats),
        lossy=lossy,
    )
