"""A client that goes away ends its request; one that reads to the end aborts nothing (H19)."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

openai = pytest.importorskip("openai")

httpx = pytest.importorskip("httpx")

LONG = {"prompt": "one two one two ", "max_tokens": 900, "ignore_eos": True, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 900, "ignore_eos": True}


@pytest.fixture
def slow(llm, monkeypatch):
    """Steps that take their time, so that what is long does not end by itself."""
    real = llm.engine.core.step

    def step():
        time.sleep(0.005)
        return real()

    monkeypatch.setattr(llm.engine.core, "step", step)


@pytest.fixture
def aborted(llm, monkeypatch):
    """Ids that the engine was told to abort."""
    names, real = [], llm.engine.abort_request

    def abort(given):
        names.extend([given] if isinstance(given, str) else given)
        return real(given)

    monkeypatch.setattr(llm.engine, "abort_request", abort)
    return names


@pytest.mark.parametrize(("path", "body"), [("completions", LONG), ("chat/completions", CHAT)])
def test_after_the_first_chunk(served, slow, aborted, path, body):
    with served.http() as http:
        with http.stream("POST", f"/v1/{path}", json=body | {"stream": True, "n": 2}) as response:
            next(response.iter_lines())
            assert served.llm.engine.core.scheduler.has_unfinished or served.service.num_open
        served.wait_idle()
    assert len(aborted) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_before_the_first_chunk(served, slow, aborted, stream):
    content = httpx.Request("POST", "http://x/v1/completions", json=LONG | {"stream": stream}).read()
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", served.port)) as raw:
        raw.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        deadline = time.monotonic() + 5
        while not served.llm.engine.core.scheduler.has_unfinished:
            assert time.monotonic() < deadline
            time.sleep(0.001)
    served.wait_idle()
    assert len(aborted) == 1


def test_a_normal_end_aborts_nothing(served, client, aborted):
    short = {"model": "tiny", "prompt": ["a b a b", "c"], "max_tokens": 20, "n": 2}
    client.completions.create(**short)
    assert list(client.completions.create(**short, stream=True))
    chat = {"model": "tiny", "messages": CHAT["messages"], "max_tokens": 20}
    client.chat.completions.create(**chat)
    assert list(client.chat.completions.create(**chat, stream=True))
    served.wait_idle()
    assert not aborted


def test_one_that_goes_away_disturbs_nobody(served, client, slow):
    fields = {"model": "tiny", "prompt": "six six six", "temperature": 0.7, "seed": 2, "max_tokens": 40}
    wanted = client.completions.create(**fields).choices[0].text

    async def main():
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none") as many:

            async def leave():
                stream = await many.completions.create(
                    model="tiny", prompt="x", max_tokens=500, stream=True, extra_body={"ignore_eos": True}
                )
                async for _ in stream:
                    break
                await stream.close()

            got, *_ = await asyncio.gather(many.completions.create(**fields), *(leave() for _ in range(6)))
            return got.choices[0].text

    assert asyncio.run(main()) == wanted
    served.wait_idle()


#: How long the suite's short version runs.
SECONDS = 8.0


def test_many_streams_with_random_disconnects(served):
    """What ``benchmarks/serving_soak.py`` does for minutes, for seconds."""
    from specdecode.testing.soak import Load, soak

    told = asyncio.run(soak(Load(url=served.url, streams=24, seconds=SECONDS, seed=1)))
    assert told.finished > 10 and told.left > 10 and not told.faults, told
    served.wait_idle(2.0)
    pool = served.llm.engine.core.scheduler.pool
    pool.check([])
    assert pool.num_free == pool.num_blocks
    assert not served.llm.num_streams
