"""Puts an OpenAI-compatible server, ours or another, under load at given rates, and takes its times.

Requests come when a Poisson process says so, whether or not earlier ones were answered: a server that
is too slow is seen to fall behind. Every side of a comparison gets the same prompts at the same times.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from specdecode.contract import ConfigError

from .tasks import Prompt

if TYPE_CHECKING:
    import httpx


@attrs.frozen(kw_only=True)
class Side:
    """One way to ask, such as with and without speculation; ``body`` is added to every request."""

    name: str
    body: Mapping[str, Any] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class Target:
    """The server, and how it is asked."""

    url: str  #: what comes before ``/v1``
    model: str
    api_key: str | None = None
    chat: bool = True
    max_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = False  #: a field that vLLM, SGLang and specdecode know, and OpenAI does not
    timeout: float = 600.0  #: seconds of one request

    def body(self, prompt: Prompt, side: Side) -> dict[str, Any]:
        asked: dict[str, Any] = {"messages": prompt.messages} if self.chat else {"prompt": prompt.whole}
        asked |= {
            "model": self.model,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            asked["ignore_eos"] = True
        return asked | dict(side.body)

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def client(self) -> httpx.AsyncClient:
        import httpx

        headers = {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=1000)
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=self.timeout, limits=limits)


@attrs.define(kw_only=True)
class Timing:
    """One request. Times are ``time.perf_counter`` seconds."""

    sent: float
    first: float | None = None  #: when the first text came
    last: float | None = None
    done: float | None = None
    tokens: int = 0
    prompt_tokens: int = 0
    gaps: list[float] = attrs.field(factory=list)  #: seconds between pieces; a piece may be several tokens
    drafted: int = 0
    accepted: int = 0
    gained: float = 0.0  #: tokens of the steps that verified drafts, as far as the server tells
    draft_steps: int = 0
    error: str | None = None

    @property
    def ttft(self) -> float | None:
        """Seconds to the first text."""
        return None if self.first is None else self.first - self.sent

    @property
    def inter_token(self) -> float | None:
        """Mean seconds from token to token."""
        if self.first is None or self.last is None or self.tokens < 2:
            return None
        return (self.last - self.first) / (self.tokens - 1)

    @property
    def end_to_end(self) -> float | None:
        return None if self.done is None else self.done - self.sent


@attrs.frozen(kw_only=True)
class Run:
    """One side at one rate."""

    side: str
    rate: float  #: requests a second; infinite: all at once
    seconds: float  #: from the first request to the last answer
    timings: tuple[Timing, ...]


def arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Seconds at which ``count`` requests come: a Poisson process; all at 0 for an infinite rate."""
    if math.isinf(rate):
        return [0.0] * count
    dice, now, times = random.Random(seed), 0.0, []
    for _ in range(count):
        times.append(now)
        now += dice.expovariate(rate)
    return times


def count_requests(rate: float, seconds: float | None, count: int) -> int:
    """Requests of a run: those of ``seconds`` at ``rate``, or ``count``."""
    return count if seconds is None or math.isinf(rate) else max(1, round(rate * seconds))


async def run_load(
    target: Target,
    side: Side,
    prompts: Sequence[Prompt],
    rate: float,
    count: int,
    *,
    advance: Callable[[], None] = lambda: None,
) -> Run:
    """Send ``count`` requests at ``rate``, the prompts in turn, and wait for the answers."""
    async with target.client() as http:
        began = time.perf_counter()

        async def one(number: int, at: float) -> Timing:
            await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
            timing = await request(http, target, side, prompts[number % len(prompts)])
            advance()
            return timing

        times = arrivals(rate, count, target.seed)
        timings = await asyncio.gather(*(one(number, at) for number, at in enumerate(times)))
    return Run(side=side.name, rate=rate, seconds=time.perf_counter() - began, timings=tuple(timings))


async def request(http: httpx.AsyncClient, target: Target, side: Side, prompt: Prompt) -> Timing:
    """One streamed request; what goes wrong is in its ``error``."""
    import httpx

    timing = Timing(sent=time.perf_counter())
    try:
        async with http.stream("POST", target.path, json=target.body(prompt, side)) as response:
            if response.status_code != 200:
                await response.aread()
                timing.error = f"status {response.status_code}: {response.text[:200]}"
                return timing
            pieces = 0
            async for line in response.aiter_lines():
                if line.startswith("data:") and line != "data: [DONE]":
                    pieces += _take(timing, json.loads(line.removeprefix("data:")), time.perf_counter())
            timing.done = time.perf_counter()
            timing.tokens = timing.tokens or pieces  # of servers that send no usage
    except (httpx.HTTPError, ValueError) as error:
        timing.error = f"{type(error).__name__}: {error}"
    return timing


def _take(timing: Timing, chunk: Mapping[str, Any], now: float) -> bool:
    """Take a chunk; whether it had text."""
    if chunk.get("error"):
        timing.error = str(chunk["error"].get("message", chunk["error"]))
    if usage := chunk.get("usage"):
        timing.tokens, timing.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]
        told = usage.get("speculation") or {}
        timing.drafted = told.get("drafted_tokens", 0)
        timing.accepted = told.get("accepted_tokens", 0)
        timing.draft_steps = told.get("draft_steps", 0)
        timing.gained = timing.draft_steps * (told.get("acceptance_length") or 0.0)
    if not any(map(_text, chunk.get("choices", ()))):
        return False
    if timing.last is not None:
        timing.gaps.append(now - timing.last)
    timing.first, timing.last = timing.first or now, now
    return True


def _text(choice: Mapping[str, Any]) -> str:
    delta = choice.get("delta") or {}
    parts = (choice.get("text"), delta.get("content"), delta.get("reasoning_content"), delta.get("reasoning"))
    return next((part for part in parts if part), "")


async def served_method(target: Target) -> str | None:
    """How a specdecode server speculates; None: not at all, or another server."""
    import httpx

    try:
        async with target.client() as http:
            response = await http.get("/specdecode/info")
            return response.json()["method"] if response.status_code == 200 else None
    except (httpx.HTTPError, ValueError, KeyError):
        return None


async def served_model(target: Target) -> str:
    """The first model of a server.

    Raises:
        ConfigError: it cannot be reached, or tells of none.
    """
    import httpx

    try:
        async with target.client() as http:
            response = await http.get("/v1/models")
            response.raise_for_status()
            return str(response.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError) as error:
        raise ConfigError(f"--url: {target.url}/v1/models cannot be read: {error or type(error)}") from None
