"""Two ranks on two GPUs: small sums in shared memory, and ends in the middle of replayed graphs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from specdecode.testing.lossless import Engine, requests
from specdecode.testing.tiny import tiny_checkpoint

pytestmark = [
    pytest.mark.skipif(torch.version.cuda is None or torch.cuda.device_count() < 2, reason="wants two GPUs"),
    pytest.mark.usefixtures("captured_steps"),
]

#: Seconds in which a dead rank is told of, and a rank without rank 0 ends.
SOON = 10.0
#: Seconds that all of a script may take: kernels are compiled for each rank.
PATIENCE = 150


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nccl")
    return tiny_checkpoint(folder / "target", output_scale=0.3, max_position_embeddings=4096)


@pytest.fixture(autouse=True)
def without_multicast(monkeypatch):
    monkeypatch.setenv("NCCL_NVLS_ENABLE", os.environ.get("NCCL_NVLS_ENABLE", "0"))


@pytest.mark.parametrize("method", [None, "ngram"])
def test_sums_in_shared_memory_have_the_bits_of_nccl(target, monkeypatch, caplog, method):
    caplog.set_level("INFO", "specdecode.distributed.peers")
    config = {"method": method, "num_speculative_tokens": 3} if method else None
    prompts, params = requests(8)
    found = {}
    for choice in ("nccl", "auto"):
        monkeypatch.setenv("SPECDECODE_ALL_REDUCE", choice)
        engine = Engine(
            target, config, "late", tensor_parallel_size=2, device="cuda", num_gpu_blocks_override=600
        )
        peers = engine.llm.llm_engine._ranks.group.peers
        assert (peers is not None) == (choice == "auto"), caplog.text  # of cards that reach each other
        found[choice] = engine(prompts, params)
        engine.llm.shutdown()
    assert found["auto"] == found["nccl"]


SCRIPT = """
import faulthandler, json, os, signal, sys, threading, time
faulthandler.dump_traceback_later(100, exit=False)
from specdecode import LLM, SamplingParams
from specdecode.api import assemble as assembling
path, who, eager = sys.argv[1], sys.argv[2], sys.argv[3] == "eager"
def told(**found):
    print(json.dumps(found), flush=True)
def make():
    return LLM(path, tensor_parallel_size=2, dtype="float32", device="cuda", skip_tokenizer_init=True,
               max_num_seqs=4, num_gpu_blocks_override=1100, enforce_eager=eager)
def timed(call):
    started = time.monotonic()
    try:
        call()
        return time.monotonic() - started, "none"
    except Exception as error:
        return time.monotonic() - started, f"{type(error).__name__}: {error}"
if who == "worker, in a capture":
    from specdecode.distributed import executors
    from specdecode.runner.graphs import Graphs
    workers, start, capture = [], executors.LocalProcesses.start, Graphs.capture
    def starting(self, *args):
        workers.extend(start(self, *args))
        return workers
    def dying(self, *args, **kwargs):
        for worker in workers:
            worker.process.kill()
        told(killed=[worker.process.pid for worker in workers])
        return capture(self, *args, **kwargs)
    executors.LocalProcesses.start = starting
    Graphs.capture = dying
    started, error = timed(make)
    told(seconds=None, error=error)
    sys.exit()
llm = make()
told(pids=llm.llm_engine.worker_pids, shared=llm.llm_engine._ranks.group.peers is not None)
prompt = [{"prompt_token_ids": [5, 6, 7]}]
def generate(count):
    params = SamplingParams(max_tokens=count, n=4, temperature=1.0, ignore_eos=True)
    llm.generate(prompt, params, use_tqdm=False)
generate(8)
pid = os.getpid() if who == "rank 0" else llm.llm_engine.worker_pids[0]
threading.Timer(0.5, lambda: os.kill(pid, signal.SIGKILL)).start()
seconds, error = timed(lambda: generate(4000))
told(seconds=seconds - 0.5, error=error)
ending, _ = timed(llm.shutdown)
told(shutdown=ending)
if who == "worker, and again":
    llm = make()  # in the same process
    generate(8)
    llm.shutdown()
    told(again=True)
"""


def ended(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("sums", ["nccl", "auto"])
@pytest.mark.parametrize(
    ("who", "mode"),
    [("worker", "graphs"), ("worker", "eager"), ("worker, and again", "graphs"), ("rank 0", "graphs"),
     ("worker, in a capture", "graphs")],
)  # fmt: skip
def test_a_killed_rank_ends_the_others(target, sums, who, mode):
    environment = os.environ | {"SPECDECODE_ALL_REDUCE": sums}
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(target), who, mode],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, env=environment,
    )  # fmt: skip
    guard = threading.Timer(PATIENCE, os.killpg, (process.pid, signal.SIGKILL))
    guard.start()
    try:
        # Workers hold stdout and stderr as well: their ends are all of the group's.
        started = time.monotonic()
        out, errors = process.communicate()
        print(f"{who}, {mode}, {sums}: {time.monotonic() - started:.1f} s in all\n{out}")
    finally:
        guard.cancel()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    found = {
        key: value for line in out.splitlines() if line[:1] == "{" for key, value in json.loads(line).items()
    }
    assert process.returncode == (-signal.SIGKILL if who == "rank 0" else 0), (out, errors[-6000:])
    if who == "rank 0":
        deadline = time.monotonic() + SOON
        while not all(map(ended, found["pids"])) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert all(map(ended, found["pids"]))
        return
    assert "WorkerDied" in found["error"], (out, errors[-6000:])
    assert "signal 9" in found["error"], found
    assert "in another process" not in found["error"], "calling off was not enough"
    if who != "worker, in a capture":
        assert found["seconds"] < SOON, found
        assert found["shutdown"] < SOON, found
        assert all(map(ended, found["pids"]))
    assert found.get("again", True)
