"""New weights while requests run and wait: of AsyncLLM, and of the server."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from specdecode import LLM, RequestOutputKind, SamplingParams
from specdecode.api.engine_thread import EngineDeadError
from specdecode.contract import ConfigError

LONG = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)
SHORT = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
PROMPT = "one two one two one two "


@pytest.fixture(scope="module")
def other_model(tmp_path_factory):
    from specdecode.testing.tiny import tiny_checkpoint

    folder = tmp_path_factory.mktemp("other") / "tiny"
    return tiny_checkpoint(folder, output_scale=0.3, max_position_embeddings=1024, seed=1)


@pytest.fixture(scope="module")
def expected(serving_model, other_model):
    """By the old weights and by the new ones: the long answer, and the short one."""
    found = []
    for path in (serving_model, other_model):
        with LLM(str(path), dtype="float32", device="cpu") as llm:
            outputs = llm.generate([PROMPT, PROMPT], [LONG, SHORT], use_tqdm=False)
            found.append([list(output.outputs[0].token_ids) for output in outputs])
    return found


@pytest.fixture
def own_llm(make_llm, monkeypatch):
    """An engine whose weights a test may change. It takes no steps while ``llm.held`` is set."""
    llm = make_llm()
    llm.held = threading.Event()
    step = llm.engine.step

    def held_back():
        if not llm.held.is_set():
            return step()
        time.sleep(0.001)
        return []

    monkeypatch.setattr(llm.engine, "step", held_back)
    yield llm
    llm.held.clear()
    llm.shutdown()


async def read(llm, params, name):
    *_, last = [output async for output in llm.generate(PROMPT, params, name)]
    return last.outputs[0]


async def begun(llm, name):
    """A long request, some of whose tokens are there; no more come while the engine is held."""
    stream = await llm.add_request(name, PROMPT, LONG.clone(output_kind=RequestOutputKind.CUMULATIVE))
    await anext(stream)
    llm.held.set()

    async def rest():
        *_, last = [output async for output in stream]
        return last.outputs[0]

    return asyncio.ensure_future(rest())


async def until(condition):
    """Raise AssertionError if it does not hold within ten seconds."""
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never holds")


@pytest.mark.parametrize("mode", ["wait", "abort", "keep"])
def test_a_request_that_comes_meanwhile_waits_for_the_new_weights(own_llm, other_model, expected, mode):
    (old_long, _), (_, new_short) = expected

    async def main():
        running = await begun(own_llm, "running")
        updating = asyncio.ensure_future(own_llm.update_weights(other_model, mode=mode))
        if mode == "wait":
            await until(lambda: own_llm._thread._updates)
        else:
            await updating
        late = asyncio.ensure_future(read(own_llm, SHORT, "late"))
        own_llm.held.clear()
        assert list((await late).token_ids) and (await updating).num_tensors == 21
        return await running, await late

    first, late = asyncio.run(main())
    assert list(late.token_ids) == new_short
    tokens = list(first.token_ids)
    if mode == "wait":
        assert tokens == old_long
    elif mode == "abort":
        assert first.finish_reason == "abort" and tokens == old_long[: len(tokens)]
    else:
        assert len(tokens) == LONG.max_tokens and tokens[:1] == old_long[:1] and tokens != old_long


def test_who_waits_at_the_door_may_go_away_or_be_ended(own_llm, other_model, expected):
    async def main():
        running = await begun(own_llm, "running")
        updating = asyncio.ensure_future(own_llm.update_weights(other_model))
        await until(lambda: own_llm._thread._updates)
        leaving, ended = (asyncio.ensure_future(read(own_llm, LONG, name)) for name in ("leaving", "ended"))
        await until(lambda: own_llm.num_streams == 3)
        leaving.cancel()
        await own_llm.abort("ended")
        output = await ended
        assert (output.finish_reason, list(output.token_ids)) == ("abort", [])
        await until(lambda: leaving.done() and own_llm.num_streams == 1)
        assert not updating.done()
        own_llm.held.clear()
        await asyncio.gather(updating, running)
        return await read(own_llm, SHORT, "after")

    assert list(asyncio.run(main()).token_ids) == expected[1][1]


def test_an_engine_that_sleeps(own_llm, other_model, expected):
    async def main():
        running = await begun(own_llm, "running")
        await own_llm.sleep()
        own_llm.held.clear()
        with pytest.raises(ConfigError, match="mode='wait' waits for 1 requests, and the engine sleeps"):
            await own_llm.update_weights(other_model)
        await own_llm.update_weights(other_model, mode="keep")
        late = asyncio.ensure_future(read(own_llm, SHORT, "late"))
        await asyncio.sleep(0.05)
        assert not late.done() and await own_llm.is_sleeping()
        await own_llm.wake_up()
        return await running, await late

    running, late = asyncio.run(main())
    assert len(running.token_ids) == LONG.max_tokens and list(late.token_ids) == expected[1][1]


def test_reading_that_fails_in_the_middle_ends_the_engine(own_llm, other_model, monkeypatch):
    from specdecode.models.weights import StoredTensor

    def failing(self):
        raise OSError("the disk is gone")

    async def main():
        running = await begun(own_llm, "running")
        monkeypatch.setattr(StoredTensor, "map", failing)
        with pytest.raises(Exception, match="the disk is gone"):
            await own_llm.update_weights(other_model, mode="keep")
        with pytest.raises(EngineDeadError, match="the disk is gone"):
            await running

    asyncio.run(main())
    assert own_llm.errored


def test_the_server_takes_new_weights_from_who_may(own_llm, serve, other_model, expected):
    from specdecode.serve.settings import read_keys

    (admin,) = read_keys(["admin-key"], None)
    served = serve(own_llm, admin_key=admin)
    ask = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    wish = {"model": str(other_model)}
    with served.http() as http, served.http(headers={"authorization": "Bearer admin-key"}) as as_admin:
        before = http.post("/v1/completions", json=ask).json()["choices"][0]["text"]
        assert http.post("/update_weights", json=wish).status_code == 401
        bodies = (
            {"model": "nowhere"},
            wish | {"mode": "later"},
            {},
            {"model": "~nobody-has-this/" + "x" * 300},
        )
        for body in bodies:
            answer = as_admin.post("/update_weights", json=body)
            assert answer.status_code == 400 and answer.json()["error"]["message"]
        assert http.post("/v1/completions", json=ask).json()["choices"][0]["text"] == before
        # One that runs finishes by the old weights; the update answers behind it.
        pieces = []
        client = served.client()

        def stream():
            for chunk in client.completions.create(**ask | {"max_tokens": 300}, model="tiny", stream=True,
                                                   extra_body={"ignore_eos": True}):  # fmt: skip
                pieces.append(chunk.choices[0].text)

        ask.pop("ignore_eos")
        running = threading.Thread(target=stream)
        running.start()
        while not pieces:
            running.join(0.001)
        own_llm.held.set()
        threading.Timer(0.3, own_llm.held.clear).start()
        told = as_admin.post("/update_weights", json=wish).json()
        running.join(30)
        assert told["source"] == str(other_model) and told["num_tensors"] == 21 and told["seconds"] > 0
        assert "".join(pieces) == own_llm.get_tokenizer().decode(expected[0][0])
        answer = http.post("/v1/completions", json=ask | {"ignore_eos": True}).json()
        assert answer["choices"][0]["text"] == own_llm.get_tokenizer().decode(expected[1][1]) != before
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
