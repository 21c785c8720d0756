"""Requests whose replica is lost, without Ray: what a reader gets is what one engine would have said."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import attrs
import pytest

pytest.importorskip("ray", reason="no Ray")

from specdec_fleet.errors import RequestLostError
from specdecode import SamplingParams
from specdecode.api.engine_thread import EngineDeadError
from specdecode.api.params import RequestOutputKind
from specdecode.contract import ConfigError

PROMPT = "abcabcabc"
DEATHS = ([0], [1], [2, 5], [9, 3, 1])
ASKS = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.9, "seed": 7, "n": 2},
    "told": {"temperature": 0.8, "seed": 3, "logprobs": 2, "prompt_logprobs": 1, "stop": ["zq"]},
    "penalised": {"temperature": 0.7, "seed": -5, "repetition_penalty": 1.2, "top_p": 0.9},
}


class Reader:
    """Puts a request's outputs together as a client does."""

    def __init__(self, kind: RequestOutputKind) -> None:
        self.kind = kind
        self.completions: dict[int, dict[str, Any]] = {}
        self.prompt_logprobs: Any = None

    def read(self, output: Any) -> None:
        assert output.prompt == PROMPT and len(output.prompt_token_ids) == len(PROMPT)
        if output.prompt_logprobs is not None:
            assert self.kind is not RequestOutputKind.DELTA or self.prompt_logprobs is None
            self.prompt_logprobs = output.prompt_logprobs
        for one in output.outputs:
            now = {
                "text": one.text,
                "token_ids": list(one.token_ids),
                "logprobs": list(one.logprobs or ()),
                "token_sources": len(one.token_sources),
            }
            if self.kind is RequestOutputKind.DELTA:
                before = self.completions.get(
                    one.index, {"text": "", "token_ids": [], "logprobs": [], "token_sources": 0}
                )
                now = {name: before[name] + value for name, value in now.items()}
            self.completions[one.index] = now | {"finish_reason": one.finish_reason}


async def read(llm: Any, params: SamplingParams, name: str = "r") -> Reader:
    reader = Reader(params.output_kind)
    async for output in llm.generate(PROMPT, params, name):
        reader.read(output)
    return reader


@pytest.mark.parametrize("kind", list(RequestOutputKind), ids=lambda kind: kind.name.lower())
@pytest.mark.parametrize("ask", ASKS)
def test_replicas_that_die_change_nothing(one_engine, fleet_of, ask, kind):
    params = SamplingParams(max_tokens=24, ignore_eos=True, output_kind=kind, **ASKS[ask])

    async def main() -> None:
        expected = await read(one_engine, params)
        for deaths in DEATHS:
            fleet, replicas = await fleet_of(deaths)
            got = await read(fleet, params)
            assert got.completions == expected.completions, deaths
            assert got.prompt_logprobs == expected.prompt_logprobs
            assert len(replicas.asks) == len(deaths) + 1
            assert not replicas.open
            await fleet.shutdown()

    asyncio.run(main())


def test_a_request_without_a_seed_goes_on_with_the_tokens_it_has(fleet_of):
    params = SamplingParams(
        temperature=1.5, max_tokens=30, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )

    async def main() -> None:
        fleet, replicas = await fleet_of([9, 14])
        told = [list(one.outputs[0].token_ids) async for one in fleet.generate(PROMPT, params, "r")]
        assert sum(map(len, told)) == 30
        seeds = {ask.params.seed for ask in replicas.asks}
        assert len(replicas.asks) == 3 and len(seeds) == 1 and None not in seeds
        other, others = await fleet_of([])
        await read(other, params)
        await read(other, params, "s")
        assert len({ask.params.seed for ask in others.asks}) == 2, "two requests draw two seeds"

    asyncio.run(main())


def test_when_all_attempts_are_spent_the_request_ends_with_a_clear_error(fleet_of):
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)

    async def main() -> None:
        fleet, replicas = await fleet_of([3, 3, 3], retries=2)
        with pytest.raises(RequestLostError, match=r"tried 3 times .*killed"):
            await read(fleet, params)
        metrics = {metric.name: metric.value for metric in await fleet.get_metrics()}
        assert metrics["specdecode:request_retries"] == 2 and metrics["specdecode:requests_lost"] == 1
        assert not replicas.open

    asyncio.run(main())


def test_replicas_that_differ_are_found_out(fleet_of):
    """Never a stream that is half of one answer and half of another."""
    params = SamplingParams(
        max_tokens=900, temperature=0.0, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )

    def change(attempt: int, output: Any) -> Any:
        if attempt == 0:
            return output
        one = output.outputs[0]
        return attrs.evolve(output, outputs=[attrs.evolve(one, token_ids=[9] * len(one.token_ids))])

    async def main() -> None:
        fleet, _ = await fleet_of([600], change=change)
        with pytest.raises(RequestLostError, match="same hardware"):
            await read(fleet, params)

    asyncio.run(main())


def test_a_dead_engine_is_asked_no_more(fleet_of):
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)

    async def main(shunned: float) -> list[list[str]]:
        fleet, replicas = await fleet_of([3], shunned=shunned)
        await read(fleet, params)
        await read(fleet, params, "next")
        return [sorted(ask.avoid) for ask in replicas.asks]

    assert asyncio.run(main(math.inf)) == [[], ["replica-0"], ["replica-0"]]
    assert asyncio.run(main(0.0)) == [[], [], []], "a connection that broke says nothing of the replica"


def test_a_replica_that_falls_silent_is_left(one_engine, fleet_of):
    params = SamplingParams(
        max_tokens=20, temperature=0.0, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )

    async def main() -> None:
        from specdec_fleet.messages import Accepted, Pulse

        fleet, replicas = await fleet_of([], silence=0.2)
        answers = replicas.generate

        async def silent_once(ask: Any) -> Any:
            if replicas.asks:
                async for message in answers(ask):
                    yield message
                return
            replicas.asks.append(ask)
            yield Accepted("silent")
            for _ in range(4):  # signs of life are waited for, longer than it may be silent
                await asyncio.sleep(0.1)
                yield Pulse()
            await asyncio.sleep(60)

        replicas.generate = silent_once
        got, want = await read(fleet, params), await read(one_engine, params)
        assert got.completions == want.completions
        assert [sorted(ask.avoid) for ask in replicas.asks] == [[], ["silent"]]

    asyncio.run(main())


def test_nobody_takes_a_request(fleet_of, monkeypatch):
    async def main() -> None:
        fleet, replicas = await fleet_of([], patience=0.05)

        async def never(ask: Any) -> Any:
            await asyncio.sleep(60)
            yield

        replicas.generate = never
        with pytest.raises(RequestLostError, match=r"no replica took the request within 0\.05 seconds"):
            await read(fleet, SamplingParams(max_tokens=4))

    asyncio.run(main())


def test_what_a_replica_refuses_is_told_at_once_and_not_tried_again(fleet_of):
    async def main() -> None:
        fleet, replicas = await fleet_of([])
        with pytest.raises(ConfigError, match="has no effect with scheduling_policy"):
            await fleet.add_request("r", PROMPT, SamplingParams(max_tokens=4), priority=3)
        assert len(replicas.asks) == 1
        with pytest.raises(ConfigError, match="prompt is empty"):
            await fleet.prepare({"prompt_token_ids": []}, SamplingParams())

    asyncio.run(main())


def test_a_reader_that_leaves_ends_the_request(one_engine, fleet_of):
    params = SamplingParams(max_tokens=900, temperature=0.0, ignore_eos=True)

    async def main() -> None:
        fleet, replicas = await fleet_of([])
        async for _ in (outputs := fleet.generate(PROMPT, params, "r")):
            break
        await outputs.aclose()
        async with asyncio.timeout(5):
            while replicas.open or one_engine.num_streams:
                await asyncio.sleep(0.01)

    asyncio.run(main())


def test_over_http(fleet_of):
    """The server is core's: a lost replica is not seen, retries that are spent are status 503."""
    httpx = pytest.importorskip("httpx")
    pytest.importorskip("fastapi")
    from specdecode.serve.app import make_app

    body = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0, "ignore_eos": True}

    async def main() -> None:
        async def post(deaths: list[int], **fields: Any) -> Any:
            fleet, _ = await fleet_of(deaths, retries=1)
            transport = httpx.ASGITransport(make_app(fleet))
            async with httpx.AsyncClient(transport=transport, base_url="http://fleet") as client:
                return await client.post("/v1/completions", json=body | fields)

        well, retried = await post([]), await post([1])
        assert well.json()["choices"] == retried.json()["choices"]
        streamed = await post([6], stream=True)
        assert "error" not in streamed.text
        lost = await post([1, 1])
        assert lost.status_code == 503 and "tried twice" not in lost.text
        assert "tried 2 times" in lost.json()["error"]["message"]
        cut = await post([6, 6], stream=True)
        last = [line for line in cut.text.splitlines() if line.startswith("data: {")][-1]
        assert '"error"' in last and "tried 2 times" in last

    asyncio.run(main())


def test_a_lost_request_is_an_engine_that_has_stopped_to_who_knows_no_fleets():
    assert issubclass(RequestLostError, EngineDeadError)
