"""A cluster of two machines (two raylets here), three replicas: who dies changes no token, and nothing stays.

The steps share the cluster and run in their order: most take something away from it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import random
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

ray = pytest.importorskip("ray", reason="no Ray")
httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi")

pytestmark = pytest.mark.slow

#: What a replica takes: there are two of it on the head, and one on the other machine.
RESOURCES = {"engine": 1}
#: Ray notices a machine's death within a second.
QUICK = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 300,
    "health_check_failure_threshold": 3,
}
#: Ray's own processes, by their commands.
DAEMONS = re.compile(r"/ray/(core/src/ray/(gcs|raylet)/|_private/(?!workers/)|dashboard/|autoscaler/)")
PREFIX = "One two three four five six seven eight nine ten eleven twelve. "


# -- the cluster ------------------------------------------------------------------------------------
@attrs.define
class Rig:
    cluster: Any
    node: Any
    url: str
    config: dict[str, Any]
    system: Any
    model: Path
    engine: dict[str, Any]
    folder: Path
    one_engine: Any  #: that nobody kills
    processes: set[tuple[int, str]] = attrs.field(factory=set)

    def deploy(self, num_replicas: int) -> None:
        """As ``serve deploy`` does with a config file whose number of replicas was changed."""
        from ray.serve.context import _get_global_client
        from ray.serve.schema import ServeDeploySchema

        self.config["applications"][0]["deployments"] = [{"name": "Replica", "num_replicas": num_replicas}]
        _get_global_client().deploy_apps(ServeDeploySchema(**self.config))

    def where(self) -> list[Any]:
        """Where replicas run."""
        from ray import serve

        self.processes |= self.system.descendants(os.getpid())
        return list(serve.get_app_handle("fleet").whereabouts.remote().result(timeout_s=30))

    def wait_for(self, count: int, seconds: float = 60.0) -> list[Any]:
        """Until there are ``count`` replicas that answer."""
        deadline = time.monotonic() + seconds
        while len(found := self.where()) != count:
            assert time.monotonic() < deadline, found
            time.sleep(0.2)
        return found

    def http(self) -> Any:
        return httpx.AsyncClient(base_url=self.url, timeout=60)

    def metrics(self) -> list[str]:
        return httpx.get(f"{self.url}/metrics", timeout=30).text.splitlines()

    def metric(self, name: str) -> float:
        """The sum of a metric over all its labels."""
        lines = [line for line in self.metrics() if line.startswith(f"{name}{{")]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def free_port() -> int:
    """None of those that the system or Ray's workers take for themselves, which are many in the meantime."""
    for port in random.sample(range(20000, 30000), 100):
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


@pytest.fixture(scope="module")
def rig(
    fleet_model: Path, engine_options: dict[str, Any], processes: Any, one_engine: Any, tmp_path_factory: Any
) -> Iterator[Rig]:
    from ray import serve
    from ray.cluster_utils import Cluster

    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setenv("RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS", "1")
    others = processes.descendants(os.getpid())  # that tests before have left, as Python's own
    port = free_port()
    shared = {"include_dashboard": False, "object_store_memory": 80 << 20}
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 4, "resources": {"engine": 2}, "_system_config": QUICK, **shared},
    )
    rig: Rig | None = None
    try:
        node = cluster.add_node(num_cpus=1, resources={"engine": 1}, object_store_memory=80 << 20)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        fleet = {
            "cpus_per_replica": 0.25,
            "resources_per_replica": RESOURCES,
            "health_check_period": 0.5,
            "health_check_timeout": 1.5,
            "affinity_block": 16,
            "silence": 6.0,
        }
        args = {
            "model": str(fleet_model),
            "engine": engine_options,
            "server": {"served_model_name": "tiny"},
            "fleet": fleet,
        }
        application = {"name": "fleet", "import_path": "specdec_fleet:build", "args": args}
        http = {"host": "127.0.0.1", "port": port}
        config = {"proxy_location": "HeadOnly", "http_options": http, "applications": [application]}
        rig = Rig(
            cluster=cluster,
            node=node,
            url=f"http://127.0.0.1:{port}",
            config=config,
            system=processes,
            model=fleet_model,
            engine=engine_options,
            folder=tmp_path_factory.mktemp("rig"),
            one_engine=one_engine,
        )
        serve.start(proxy_location="HeadOnly", http_options=http)
        rig.deploy(3)
        deadline = time.monotonic() + 240
        while (status := serve.status().applications.get("fleet")) is None or status.status != "RUNNING":
            assert time.monotonic() < deadline and (status is None or status.status == "DEPLOYING"), status
            time.sleep(0.2)
        yield rig
        serve.shutdown()
    finally:
        seen = (processes.descendants(os.getpid()) | (rig.processes if rig else set())) - others
        ray.shutdown()
        cluster.shutdown()
        monkeypatch.undo()
    deadline = time.monotonic() + 60  # they end by themselves, beside whatever else the machine has to do
    while left := processes.alive(seen):
        if time.monotonic() > deadline:
            told = processes.commands(left)
            stuck = {pid for pid, command in told.items() if DAEMONS.search(command)}
            assert stuck == told.keys(), f"of {len(seen)} are still there: {told}"
            for pid in stuck:  # what holds no replica and no rank is Ray's own affair
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


# -- requests ---------------------------------------------------------------------------------------
@attrs.frozen
class Got:
    """What a client has of a request."""

    text: str
    tokens: tuple[str, ...]
    finish_reason: str | None
    error: Any = None


def bodies(count: int, max_tokens: int) -> list[dict[str, Any]]:
    """Streamed and whole, greedy and seeded."""
    return [
        {
            "prompt": f"{i} abcabc",
            "max_tokens": max_tokens + 7 * i,
            "ignore_eos": True,
            "stream": i % 4 != 3,
            "logprobs": 0,
            **({"temperature": 0} if i % 2 else {"temperature": 0.9, "seed": i}),
        }
        for i in range(count)
    ]


async def ask(client: Any, body: dict[str, Any], began: Callable[[], None] = lambda: None) -> Got:
    """A completion; ``began`` is called at the first piece of a stream."""
    if not body["stream"]:
        answer = (await client.post("/v1/completions", json=body)).json()
        if "error" in answer:
            return Got("", (), None, answer["error"])
        choice = answer["choices"][0]
        return Got(choice["text"], tuple(choice["logprobs"]["tokens"]), choice["finish_reason"])
    text, tokens, reason, error = "", [], None, None
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                error = chunk["error"]
                break
            began()
            (choice,) = chunk["choices"]
            text += choice["text"]
            tokens += choice["logprobs"]["tokens"]
            reason = choice["finish_reason"]
    return Got(text, tuple(tokens), reason, error)


async def expected(llm: Any, body: dict[str, Any]) -> Got:
    """What one engine says, that nobody kills."""
    from specdecode import SamplingParams

    fields = {name: value for name, value in body.items() if name not in ("prompt", "stream")}
    params = SamplingParams(**fields)
    name = f"{body['prompt']}/{body['max_tokens']}"
    outputs = [output async for output in llm.generate(body["prompt"], params, name)]
    one = outputs[-1].outputs[0]
    tokens = tuple(row[token].decoded_token for row, token in zip(one.logprobs, one.token_ids, strict=True))
    return Got(one.text, tokens, one.finish_reason)


def under_load(rig: Rig, llm: Any, asked: list[dict[str, Any]], strike: Callable[[], Any] | None) -> None:
    """Send ``asked``, call ``strike`` once all streams have begun, and compare every answer."""

    async def main() -> None:
        want = await asyncio.gather(*(expected(llm, body) for body in asked))
        begun: set[int] = set()
        async with rig.http() as client:
            running = [
                asyncio.create_task(ask(client, body, lambda i=i: begun.add(i)))
                for i, body in enumerate(asked)
            ]
            streams = sum(body["stream"] for body in asked)
            async with asyncio.timeout(60):
                while len(begun) < streams:
                    await asyncio.sleep(0.002)
            if strike is not None:
                assert not all(task.done() for task in running), "all had ended: nothing was struck"
                await asyncio.to_thread(strike)
            async with asyncio.timeout(90):
                got = await asyncio.gather(*running)
        for body, one, other in zip(asked, got, want, strict=True):
            assert one == other, body

    asyncio.run(main())


# -- the steps --------------------------------------------------------------------------------------
def three_replicas_answer_as_one_engine_does(rig: Rig) -> None:
    where = rig.wait_for(3)
    assert len({one.node for one in where}) == 2, "both machines serve"
    under_load(rig, rig.one_engine, bodies(8, 40), None)
    told = [line for line in rig.metrics() if line.startswith("vllm:generation_tokens_total{")]
    assert {line.split('replica="')[1].split('"')[0] for line in told} == {one.replica for one in where}
    assert sum(int(line.rsplit(" ", 1)[1]) > 0 for line in told) > 1, "the load was spread"
    assert rig.metric("specdecode:replicas") == 3 and rig.metric("specdecode:request_retries_total") == 0
    assert httpx.get(f"{rig.url}/health").json()["status"] == "ok"


def what_is_wrong_is_refused_by_name_through_the_fleet(rig: Rig) -> None:
    answer = httpx.post(f"{rig.url}/v1/completions", json={"prompt": "a", "priority": 2, "max_tokens": 4})
    assert answer.status_code == 400 and "scheduling_policy" in answer.json()["error"]["message"]
    answer = httpx.post(f"{rig.url}/v1/completions", json={"prompt": "x" * 2000, "max_tokens": 4})
    assert answer.status_code == 400 and "leave room" in answer.json()["error"]["message"]


def a_request_of_many_prompts_is_spread(rig: Rig) -> None:
    """Each prompt is a request of its own; together they are one of HTTP."""
    prompts = [f"{i}abc" for i in range(6)]
    body = {"prompt": prompts, "max_tokens": 30, "temperature": 0, "ignore_eos": True}
    choices = httpx.post(f"{rig.url}/v1/completions", json=body, timeout=30).json()["choices"]
    single = [{**body, "prompt": prompt, "stream": False, "logprobs": 0} for prompt in prompts]

    async def want() -> list[Got]:
        return [await expected(rig.one_engine, one) for one in single]

    assert [choice["text"] for choice in choices] == [one.text for one in asyncio.run(want())]


def a_conversation_stays_where_its_prefix_is(rig: Rig) -> None:
    """Each turn holds the ones before: all but the last blocks of it are found in the prefix cache."""
    said, before = PREFIX, 0
    for turn in range(4):
        body = {"prompt": said, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{rig.url}/v1/completions", json=body, timeout=30).json()
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached >= before - 16, f"turn {turn} was sent elsewhere"
        before = answer["usage"]["prompt_tokens"]
        said += f" And turn {turn}? " * 2


def a_machine_dies_under_load(rig: Rig) -> None:
    """Streams that were half sent go on with the tokens that were to come."""
    where = rig.wait_for(3)
    lost = {one.node for one in where} - {rig.cluster.head_node.node_id}

    def strike() -> None:
        rig.cluster.remove_node(rig.node, allow_graceful=False)

    under_load(rig, rig.one_engine, bodies(12, 300), strike)
    assert rig.metric("specdecode:request_retries_total") > 0, "nobody was on the machine"
    assert rig.metric("specdecode:requests_lost_total") == 0
    assert {one.node for one in rig.wait_for(2)}.isdisjoint(lost)


def a_drained_replica_finishes_what_it_accepted(rig: Rig) -> None:
    """Fewer replicas: who goes takes nothing new, and no request has to be computed twice."""
    before = rig.metric("specdecode:request_retries_total")
    under_load(rig, rig.one_engine, bodies(8, 300), lambda: rig.deploy(1))
    assert rig.metric("specdecode:request_retries_total") == before
    rig.wait_for(1)


def the_last_replica_goes_and_its_requests_wait_for_the_next(rig: Rig, how: signal.Signals) -> None:
    (last,) = rig.wait_for(1)
    before = rig.metric("specdecode:request_retries_total")
    under_load(rig, rig.one_engine, bodies(4, 300), lambda: os.kill(last.pid, how))
    assert rig.metric("specdecode:request_retries_total") > before
    (new,) = rig.wait_for(1)
    assert new.pid != last.pid and not any(pid == last.pid for pid in rig.system.alive(rig.processes))


def a_batch_job_outlives_its_engine(rig: Rig) -> None:
    """The engine's process dies in the middle of the job; the rows come out as if it had not."""
    from specdec_fleet import generate
    from specdecode import SamplingParams

    params = SamplingParams(temperature=0.9, seed=1, max_tokens=12, ignore_eos=True)
    prompts = [f"{i} abcabc" for i in range(6)]
    mark = str(rig.folder / "died")

    def die_once(output_ids: Any, logits: Any) -> Any:
        if len(output_ids) == 5 and not os.path.exists(mark):
            open(mark, "w").close()
            os._exit(1)
        return logits

    rows = [{"prompt": prompt, "seed": i or None} for i, prompt in enumerate(prompts)]
    dataset = ray.data.from_items([*rows, {"prompt": "x" * 2000, "seed": None}])
    engine = rig.engine | {"speculative_config": None}
    killed = params.clone(logits_processors=[die_once])
    answered = generate(
        dataset, str(rig.model), killed, batch_size=4, cpus_per_engine=0.25, **engine
    ).take_all()
    assert os.path.exists(mark) and len(answered) == len(rows) + 1
    by_prompt = {row["prompt"]: row for row in answered}
    assert "leave room" in by_prompt["x" * 2000]["error"]

    async def one(row: dict[str, Any]) -> list[int]:
        seeded = params.clone(seed=row["seed"] or 1)
        outputs = [out async for out in rig.one_engine.generate(row["prompt"], seeded, row["prompt"])]
        return list(outputs[-1].outputs[0].token_ids)

    for row in rows:
        answer = by_prompt[row["prompt"]]
        assert answer["error"] == "" and answer["finish_reason"] == "length"
        assert np.asarray(answer["token_ids"]).tolist() == asyncio.run(one(row))


def ranks_know_each_other_and_a_lost_one_is_told(rig: Rig) -> None:
    from specdec_fleet.workers import WorkerLost, place_workers
    from specdecode.contract import Unsupported

    def told() -> list[str]:
        return [os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")]

    def die() -> None:
        if os.environ["RANK"] == "1":
            os._exit(1)
        time.sleep(60)

    with place_workers(2, bundle={"CPU": 0.25}) as workers:
        first, second = workers.run(told, timeout=60)
        assert first[:2] == ["0", "2"] and second[:2] == ["1", "2"] and first[2:] == second[2:]
        with pytest.raises(WorkerLost, match="rank 1 died"):
            workers.run(die)
    with pytest.raises(Unsupported, match=r"no room within 0\.2 seconds"):
        place_workers(2, bundle={"GPU": 1.0}, timeout=0.2)


def the_ranks_of_one_model_are_actors(rig: Rig) -> None:
    """The other rank is an actor of Ray; the tokens are those of one rank; and its death is told."""
    from specdecode import LLM, SamplingParams
    from specdecode.contract import SpecdecodeError

    params = SamplingParams(temperature=0.9, seed=3, max_tokens=40, ignore_eos=True)
    shared = rig.engine | {"tensor_parallel_size": 2}
    with LLM(str(rig.model), distributed_executor_backend="ray", **shared) as llm:
        (output,) = llm.generate("abcabc", params, use_tqdm=False)

        async def alone() -> list[int]:
            outputs = [out async for out in rig.one_engine.generate("abcabc", params, "alone")]
            return list(outputs[-1].outputs[0].token_ids)

        assert list(output.outputs[0].token_ids) == asyncio.run(alone())
        (worker,) = llm.llm_engine._ranks._workers._workers
        assert worker.process.pid != os.getpid() and worker.process.poll() is None
        os.kill(worker.process.pid, signal.SIGKILL)
        with pytest.raises(SpecdecodeError, match="rank 1"):
            llm.generate("abcabc", params, use_tqdm=False)


def test_a_fleet_that_loses_replicas_machines_and_ranks(rig):
    """One test, as the steps need each other and one cluster: two workers of pytest would make two."""
    leave = the_last_replica_goes_and_its_requests_wait_for_the_next
    steps: list[Callable[[Rig], None]] = [
        three_replicas_answer_as_one_engine_does,
        what_is_wrong_is_refused_by_name_through_the_fleet,
        a_request_of_many_prompts_is_spread,
        a_conversation_stays_where_its_prefix_is,
        a_machine_dies_under_load,
        a_drained_replica_finishes_what_it_accepted,
        functools.partial(leave, how=signal.SIGSTOP),
        functools.partial(leave, how=signal.SIGKILL),
        a_batch_job_outlives_its_engine,
        ranks_know_each_other_and_a_lost_one_is_told,
        the_ranks_of_one_model_are_actors,
    ]
    for number, step in enumerate(steps, start=1):
        began = time.monotonic()
        try:
            step(rig)
        except BaseException as error:
            error.add_note(f"in step {number} of {len(steps)}: {step}")
            raise
        print(f"step {number}: {time.monotonic() - began:.1f} s")
