"""AsyncLLM: streams equal to what LLM gives, aborts, slow readers, and what happens when something breaks."""

from __future__ import annotations

import asyncio
import threading

import pytest
from specdecode import LLM, AsyncEngineArgs, AsyncLLM, RequestOutputKind, SamplingParams
from specdecode.api import door
from specdecode.api.engine_thread import MAX_FAILURES, EngineDeadError, EngineStuckError
from specdecode.contract import ConfigError

LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True, output_kind=RequestOutputKind.DELTA)


def wish(index: int, **changes) -> SamplingParams:
    fields = {"temperature": 0.8 * (index % 2), "seed": index, "max_tokens": 10 + 3 * index}
    fields["ignore_eos"] = True
    return SamplingParams(**(fields | changes))


def text(index: int) -> str:
    return f"{index} apples and {index} pears and " * (1 + index % 3)


async def collect(llm, prompt, params, request_id):
    return [output async for output in llm.generate(prompt, params, request_id)]


async def idle(llm) -> bool:
    """Whether nothing runs a second from now at the latest."""
    for _ in range(100):
        if not await llm.call(lambda engine: engine.has_unfinished_requests()):
            return True
        await asyncio.sleep(0.01)
    return False


@pytest.fixture(scope="module")
def expected(serving_model):
    """What the plain LLM gives, without speculation, one prompt at a time."""
    with LLM(str(serving_model), dtype="float32", device="cpu") as llm:
        yield [llm.generate(text(i), wish(i), use_tqdm=False)[0].outputs[0] for i in range(12)]


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_concurrent_streams_give_what_the_plain_llm_gives(llm, expected, kind):
    async def main():
        return await asyncio.gather(
            *(collect(llm, text(i), wish(i, output_kind=kind), f"{kind}-{i}") for i in range(12))
        )

    for stream, plain in zip(asyncio.run(main()), expected, strict=True):
        assert [output.finished for output in stream] == [False] * (len(stream) - 1) + [True]
        pieces = stream if kind is RequestOutputKind.DELTA else stream[-1:]
        assert "".join(piece.outputs[0].text for piece in pieces) == plain.text
        assert [t for piece in pieces for t in piece.outputs[0].token_ids] == list(plain.token_ids)
        assert stream[-1].outputs[0].finish_reason == plain.finish_reason
        assert len(stream) == 1 or kind is not RequestOutputKind.FINAL_ONLY


def test_a_slow_reader_gets_all_of_it_in_few_pieces(llm):
    params = LONG.clone(n=2, temperature=0.5, seed=3, logprobs=1, max_tokens=60)

    async def main():
        stream = await llm.add_request("slow", text(2), params)
        first = await anext(stream)
        assert await idle(llm)  # all steps are done before the second is read
        await asyncio.sleep(0.01)
        return [first, *[output async for output in stream]]

    pieces = asyncio.run(main())
    whole = asyncio.run(
        collect(llm, text(2), params.clone(output_kind=RequestOutputKind.FINAL_ONLY), "quick")
    )[0]
    assert len(pieces) == 2
    for index in range(2):
        given, wanted = [piece.outputs[index] for piece in pieces], whole.outputs[index]
        assert "".join(piece.text for piece in given) == wanted.text
        for field in ("token_ids", "token_sources", "logprobs"):
            assert [x for piece in given for x in getattr(piece, field)] == list(getattr(wanted, field))


def test_requests_are_served_side_by_side(llm):
    """A short request that comes late ends before a long one that came first."""

    async def main():
        order = []

        async def run(name, params):
            await collect(llm, text(1), params, name)
            order.append(name)

        long = asyncio.ensure_future(run("long", LONG))
        await asyncio.sleep(0.05)
        await asyncio.gather(*(run(f"short-{i}", wish(0, max_tokens=3)) for i in range(4)), long)
        return order

    assert asyncio.run(main())[-1] == "long"


@pytest.mark.parametrize("how", ["close", "cancel", "abort"])
def test_a_request_nobody_wants_ends_and_its_id_is_free_again(llm, how):
    async def main():
        async def read():
            async for output in llm.generate(text(3), LONG, "gone"):
                seen.append(output)
                started.set()

        seen, started = [], asyncio.Event()
        if how == "close":
            stream = llm.generate(text(3), LONG, "gone")
            await anext(stream)
            await stream.aclose()
        else:
            task = asyncio.ensure_future(read())
            await started.wait()
            if how == "cancel":
                task.cancel()
            else:
                await llm.abort("gone")
            await asyncio.gather(task, return_exceptions=True)
        assert await idle(llm)
        if how == "abort":
            assert seen[-1].finished and seen[-1].outputs[0].finish_reason == "abort"
            assert sum(len(output.outputs[0].token_ids) for output in seen) < LONG.max_tokens
        await llm.abort(["gone", "unknown"])  # twice, and nobody's: passed over
        (again,) = await collect(
            llm, text(3), wish(0, output_kind=RequestOutputKind.FINAL_ONLY, max_tokens=2), "gone"
        )
        assert len(again.outputs[0].token_ids) == 2

    asyncio.run(main())


def test_a_normal_end_aborts_nothing(llm, monkeypatch):
    aborted = []
    real = llm.engine.abort_request
    monkeypatch.setattr(llm.engine, "abort_request", lambda names: aborted.append(names) or real(names))
    asyncio.run(collect(llm, text(1), wish(1), "fine"))
    assert asyncio.run(idle(llm)) and not aborted


@pytest.mark.parametrize("what", ["structure", "text", "ids"])
def test_what_takes_long_to_read_holds_up_only_its_like(llm, expected, monkeypatch, what):
    begun, go = threading.Event(), threading.Event()

    def slowly(real, is_slow):
        def function(*args, **keywords):
            if is_slow(*args):
                begun.set()
                assert go.wait(30)
            return real(*args, **keywords)

        return function

    engine = llm.engine
    long = [5] * door.LONG if what == "ids" else "a" * door.LONG
    prompt = text(1) if what == "structure" else {"prompt_token_ids" if what == "ids" else "prompt": long}
    params = wish(1, structured_outputs={"regex": "a{3}"} if what == "structure" else None)
    monkeypatch.setattr(engine, "check_structure", slowly(engine.check_structure, lambda p: p.structure))
    monkeypatch.setattr(
        engine, "prepare", slowly(engine.prepare, lambda p, _: isinstance(p, dict) and door.is_long(p))
    )

    async def main():
        slow = asyncio.ensure_future(collect(llm, prompt, params, "slow"))
        assert await asyncio.to_thread(begun.wait, 30)
        beside = [collect(llm, text(seed), wish(seed), f"beside-{seed}") for seed in (2, 3)]
        outputs = await asyncio.wait_for(asyncio.gather(*beside), 30)
        assert not slow.done()
        go.set()
        ended = await asyncio.gather(slow, return_exceptions=True)
        return outputs, ended[0]

    outputs, ended = asyncio.run(main())
    assert [told[-1].outputs[0].text for told in outputs] == [expected[seed].text for seed in (2, 3)]
    if what == "structure":
        assert ended[-1].outputs[0].text == "aaa"
    else:
        assert isinstance(ended, ConfigError) and f"has {door.LONG} tokens" in str(ended)


def test_what_is_wrong_with_one_request_is_told_to_it_alone(llm, expected):
    def broken(output_ids, logits):
        raise RuntimeError("on purpose")

    async def main():
        async def refused(prompt, params, request_id, match):
            with pytest.raises(ConfigError, match=match):
                await collect(llm, prompt, params, request_id)

        beside = asyncio.ensure_future(collect(llm, text(11), wish(11), "beside"))
        await asyncio.sleep(0.02)
        await refused(text(1), wish(1), "beside", "in use")
        await refused(["no"], wish(1), "bad-prompt", "prompt must be")
        await refused(text(1), wish(1, stop_token_ids=[10**6]), "bad-params", "stop_token_ids")
        await refused(text(1), wish(1, structured_outputs={"regex": "("}), "bad-regex", "regex")
        ended = await collect(llm, text(1), wish(1, logits_processors=[broken]), "bad-processor")
        assert ended[-1].outputs[0].finish_reason == "error"
        return await beside

    assert asyncio.run(main())[-1].outputs[0].text == expected[11].text


def test_a_step_that_fails_is_tried_again(make_llm, monkeypatch):
    llm, calls = make_llm(), []
    real = llm.engine.core.step

    def flaky():
        calls.append(1)
        if len(calls) in (3, 4):
            raise MemoryError("out of memory, for now")
        return real()

    wanted = asyncio.run(collect(llm, text(2), wish(2), "before"))[-1].outputs[0].text
    monkeypatch.setattr(llm.engine.core, "step", flaky)
    try:
        assert asyncio.run(collect(llm, text(2), wish(2), "one"))[-1].outputs[0].text == wanted
        assert len(calls) > 5
    finally:
        llm.shutdown()


def test_a_dead_engine_tells_everybody(make_llm, monkeypatch):
    llm = make_llm()

    def broken():
        raise ValueError("the device is gone")

    async def main():
        reading = [asyncio.ensure_future(collect(llm, text(i), LONG, str(i))) for i in range(3)]
        await asyncio.sleep(0.05)
        monkeypatch.setattr(llm.engine.core, "step", broken)
        for error in await asyncio.gather(*reading, return_exceptions=True):
            assert isinstance(error, EngineDeadError)
            assert "ValueError: the device is gone" in str(error)
        with pytest.raises(EngineDeadError, match="the device is gone"):
            await collect(llm, text(0), LONG, "late")
        with pytest.raises(EngineDeadError):
            await llm.get_metrics()
        with pytest.raises(EngineDeadError):
            await llm.check_health()
        assert llm.errored

    asyncio.run(main())
    llm.shutdown()
    assert MAX_FAILURES > 1


def test_shutdown_ends_what_runs(make_llm):
    llm = make_llm()

    async def main():
        reading = asyncio.ensure_future(collect(llm, text(1), LONG, "running"))
        await asyncio.sleep(0.05)
        await llm.__aexit__(None, None, None)
        with pytest.raises(EngineDeadError, match="shut down"):
            await reading

    asyncio.run(main())
    llm.shutdown()  # again
    llm.engine.core.scheduler.pool.check([])


def test_a_stuck_step_is_seen(llm, monkeypatch):
    release, entered = threading.Event(), threading.Event()
    real = llm.engine.core.step

    def hangs():
        entered.set()
        release.wait(10)
        return real()

    async def main():
        await llm.check_health(stuck_after=0.2)
        monkeypatch.setattr(llm.engine.core, "step", hangs)
        reading = asyncio.ensure_future(collect(llm, text(1), wish(1), "patient"))
        await asyncio.to_thread(entered.wait, 10)
        await llm.check_health(stuck_after=30)
        await asyncio.sleep(0.25)
        with pytest.raises(EngineStuckError, match="under way"):
            await llm.check_health(stuck_after=0.2)
        release.set()
        await reading
        assert await idle(llm)
        await llm.check_health(stuck_after=0.2)

    try:
        asyncio.run(main())
    finally:
        release.set()


def test_a_loop_that_was_closed_leaves_nothing_running(llm):
    async def walk_away():
        stream = await llm.add_request("orphan", text(1), LONG)
        await anext(stream)

    asyncio.run(walk_away())
    assert asyncio.run(idle(llm))


def test_metrics_and_prefix_cache(llm):
    async def main():
        await collect(llm, text(4), wish(2), "counted")
        counted = {metric.name: metric.value for metric in await llm.get_metrics()}
        assert counted["vllm:spec_decode_num_accepted_tokens"] > 0
        assert await llm.reset_prefix_cache()
        again = await collect(llm, text(4), wish(2), "again")
        assert again[-1].num_cached_tokens == 0
        assert (await collect(llm, text(4), wish(2), "cached"))[-1].num_cached_tokens > 0

    asyncio.run(main())


def test_engine_args(serving_model):
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(serving_model), dtype="float32", device="cpu"))
    try:
        assert asyncio.run(collect(llm, text(0), wish(0), "one"))[-1].finished
    finally:
        llm.shutdown()
    with pytest.raises(ConfigError, match="max_num_seq"):
        AsyncEngineArgs(model=str(serving_model), max_num_seq=3)


def test_with_the_host_running_ahead(make_llm, expected):
    """The overlapped loop: the same streams, and aborts of what is still under way."""
    llm = make_llm(async_scheduling=True)

    async def main():
        async def leave(index):
            async for _ in llm.generate(text(index), LONG, f"leaves-{index}"):
                break

        reading = [collect(llm, text(i), wish(i), str(i)) for i in range(12)]
        streams, *_ = await asyncio.gather(asyncio.gather(*reading), *(leave(i) for i in range(4)))
        assert await idle(llm)
        return streams

    try:
        for stream, plain in zip(asyncio.run(main()), expected, strict=True):
            assert stream[-1].outputs[0].text == plain.text
        llm.engine.core.scheduler.pool.check([])
    finally:
        llm.shutdown()
