"""What a request gives back, shaped as in vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import attrs

from ..lora.request import LoRARequest


@attrs.frozen
class Logprob:
    """``rank`` counts from 1; ``decoded_token`` is None without a tokenizer."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@attrs.frozen(kw_only=True)
class CompletionOutput:
    """One completion of a prompt."""

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None = None
    logprobs: Sequence[Mapping[int, Logprob]] | None = None
    finish_reason: Literal["stop", "length", "abort", "error"] | None = None
    #: the stop string or stop_token_id that ended it; None for an EOS or a length
    stop_reason: int | str | None = None
    #: for each token whether it came as an accepted draft
    token_sources: Sequence[Literal["draft", "target"]] = ()
    #: what went wrong under finish_reason "error"; the tokens before it are right
    error: str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@attrs.frozen(kw_only=True)
class RequestMetrics:
    """Of all completions of a request; times are ``time.perf_counter`` seconds."""

    arrival_time: float
    first_scheduled_time: float | None
    first_token_time: float | None
    finished_time: float | None
    drafted: int  #: draft tokens verified
    accepted: int  #: of them accepted, and part of the output
    draft_steps: int  #: verifications that had drafts
    steps: int  #: target forwards that gave tokens, the first token's not counted
    preemptions: int
    discarded: int = 0  #: drafts accepted behind the end of the output: a stop, an end-of-sequence token
    bonus: int = 0  #: output tokens that the target drew at the end of a verification that had drafts
    #: the rule of verification, if the output has not the model's law: "typical", or "synthetic"
    lossy: str | None = None

    @property
    def synthetic(self) -> bool:
        """Whether drafts were accepted by rate, whatever their tokens: the text means nothing."""
        return self.lossy == "synthetic"

    @property
    def first_token_latency(self) -> float | None:
        """Seconds from its arrival to its first token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens that a verification with drafts gave the output, the bonus token counted."""
        return (self.accepted + self.bonus) / self.draft_steps if self.draft_steps else None


@attrs.frozen(kw_only=True)
class RequestOutput:
    """A prompt and what came of it."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: Sequence[CompletionOutput]
    finished: bool
    #: one entry for each prompt token, None for the first; under DELTA with the first output only
    prompt_logprobs: Sequence[Mapping[int, Logprob] | None] | None = None
    metrics: RequestMetrics | None = None
    #: prompt tokens found in the prefix cache
    num_cached_tokens: int = 0
    lora_request: LoRARequest | None = None  #: the adapter it was answered with
