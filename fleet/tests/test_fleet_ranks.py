"""Replicas of two ranks, one of which dies in the middle of a stream; its own cluster, when asked for."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="no Ray")
httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi")

pytestmark = pytest.mark.sweep

PORT = 28432
#: How each kind of rank looks among the processes.
LOOKS = {"mp": b"specdecode.distributed.worker", "ray": b"RankActor"}


@pytest.fixture
def pid_of(processes: Any) -> Callable[[bytes], int]:
    """The one process of ours that looks so."""

    def find(looks: bytes) -> int:
        found = []
        for pid, _ in processes.descendants(os.getpid()):
            with contextlib.suppress(OSError):
                if looks in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        (pid,) = found
        return pid

    return find


@pytest.fixture(scope="module")
def cluster():
    from ray import serve
    from ray.cluster_utils import Cluster

    shared: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={"include_dashboard": False, **shared})
    cluster.add_node(**shared)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    serve.start(http_options={"host": "127.0.0.1", "port": PORT}, proxy_location="HeadOnly")
    yield cluster
    serve.shutdown()
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.parametrize("backend", LOOKS)
def test_a_rank_dies_and_the_stream_goes_on(cluster, fleet_model, engine_options, pid_of, backend):
    from ray import serve
    from specdec_fleet import build

    engine = engine_options | {"tensor_parallel_size": 2, "distributed_executor_backend": backend}
    # So many CPUs that two ranks which are actors have no room on one machine.
    fleet = {"cpus_per_replica": 1.5 if backend == "ray" else 1.0, "health_check_period": 1.0}
    args = {"model": str(fleet_model), "engine": engine, "fleet": fleet}
    serve.run(build(args), name="fleet")
    body = {"prompt": "abcabc", "max_tokens": 400, "temperature": 0.9, "seed": 4, "ignore_eos": True}
    with httpx.Client(base_url=f"http://127.0.0.1:{PORT}", timeout=120) as client:
        want = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
        got, rank = "", pid_of(LOOKS[backend])
        with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    if not got:
                        os.kill(rank, signal.SIGKILL)
                    got += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
        assert got == want and pid_of(LOOKS[backend]) != rank
        assert 'request_retries_total{model_name="tiny",engine="0"} 1' in client.get("/metrics").text
