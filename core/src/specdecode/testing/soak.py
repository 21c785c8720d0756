"""Many clients of a server at once, half of which go away in the middle: what must hold for those that stay.

``benchmarks/serving_soak.py`` runs it for minutes and watches the server's memory.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping
from typing import Any

import attrs
import httpx

#: Prompts, each with a seed: the same answer whenever it is asked.
PROMPTS = [f"{number} sheep and {number} goats and " * (1 + number % 4) for number in range(16)]


@attrs.frozen(kw_only=True)
class Load:
    """What clients do."""

    url: str
    streams: int  #: clients at a time
    seconds: float
    seed: int = 0
    leaving: float = 0.5  #: share of the requests whose client goes away
    max_tokens: int = 64


@attrs.define
class Told:
    """What became of the requests."""

    finished: int = 0
    left: int = 0
    tokens: int = 0  #: of those that finished
    faults: list[str] = attrs.field(factory=list)
    _answers: dict[tuple[int, bool, int], str] = attrs.field(factory=dict, repr=False)

    def answered(self, which: tuple[int, bool, int], text: str, tokens: int) -> None:
        """A request has been answered to its end; equal ones are answered alike."""
        self.finished += 1
        self.tokens += tokens
        if self._answers.setdefault(which, text) != text:
            self.faults.append(f"{which} was answered otherwise before")
        if tokens != which[2]:
            self.faults.append(f"{which} got {tokens} tokens")


async def soak(load: Load) -> Told:
    """Keep ``load.streams`` clients busy for ``load.seconds``, and let those that stay finish."""
    told = Told()
    deadline = time.monotonic() + load.seconds
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=load.streams)
    async with httpx.AsyncClient(base_url=load.url, timeout=120, limits=limits) as http:
        await asyncio.gather(
            *(
                _client(http, load, told, random.Random(f"{load.seed}/{i}"), deadline)
                for i in range(load.streams)
            )
        )
    return told


async def _client(
    http: httpx.AsyncClient, load: Load, told: Told, dice: random.Random, deadline: float
) -> None:
    while time.monotonic() < deadline:
        number, chat = dice.randrange(len(PROMPTS)), dice.random() < 0.5
        tokens = dice.choice((load.max_tokens // 4, load.max_tokens))
        stay = dice.randrange(1, 12) if dice.random() < load.leaving else None
        try:
            if stay is not None and dice.random() < 0.3:
                await _leave_early(http, number, chat, tokens, dice.random() * 0.05)
                told.left += 1
            else:
                await _stream(http, (number, chat, tokens), stay, told)
        except (httpx.HTTPError, ValueError, KeyError) as error:
            told.faults.append(f"{number}: {type(error).__name__}: {error}")


def _body(number: int, chat: bool, tokens: int) -> tuple[str, dict[str, Any]]:
    body = {"max_tokens": tokens, "ignore_eos": True, "temperature": 0.7, "seed": number}
    if chat:
        return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": PROMPTS[number]}]}
    return "/v1/completions", body | {"prompt": PROMPTS[number]}


async def _leave_early(http: httpx.AsyncClient, number: int, chat: bool, tokens: int, seconds: float) -> None:
    """Go away while the whole answer is waited for."""
    path, body = _body(number, chat, tokens)
    asking = asyncio.ensure_future(http.post(path, json=body))
    await asyncio.sleep(seconds)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


async def _stream(
    http: httpx.AsyncClient, which: tuple[int, bool, int], stay: int | None, told: Told
) -> None:
    """Read an answer to its end, or ``stay`` chunks of it."""
    path, body = _body(*which)
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    text, tokens, chunks, done = "", 0, 0, False
    async with http.stream("POST", path, json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line:
                continue
            chunks += 1
            if stay is not None and chunks > stay:
                told.left += 1
                return
            if line == "data: [DONE]":
                done = True
                continue
            chunk = json.loads(line.removeprefix("data: "))
            text += "".join(map(_text, chunk["choices"]))
            tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
    if not done:
        told.faults.append(f"{which}: the stream ended early")
    told.answered(which, text, tokens)


def _text(choice: Mapping[str, Any]) -> str:
    return str(choice["delta"].get("content") or "" if "delta" in choice else choice["text"])
