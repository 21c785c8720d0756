"""Ranks as processes: that they start, agree, are missed when they die, and end with the engine."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from specdecode import SamplingParams
from specdecode.api.async_llm import AsyncLLM
from specdecode.api.engine_thread import EngineDeadError
from specdecode.contract import ConfigError
from specdecode.distributed.errors import WorkerDied
from specdecode.testing.lossless import Engine, requests
from specdecode.testing.tiny import tiny_checkpoint

#: Seconds in which a dead worker is told of, and a worker without rank 0 ends.
SOON = 10.0
LONG = SamplingParams(max_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    torch.set_num_threads(1)
    return tiny_checkpoint(tmp_path_factory.mktemp("processes") / "target", output_scale=0.2)


def alive(pid: int) -> bool:
    """Whether a process runs; not one that has ended and was not waited for."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def gone(pids, patience=SOON):
    deadline = time.monotonic() + patience
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(alive, pids))


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
def test_a_killed_worker_ends_every_request_with_one_error(target):
    """Two ranks are two processes; what they generate is what one does; then one is killed."""
    prompts, params = requests(4)
    engine = Engine(target, {"method": "suffix", "num_speculative_tokens": 3}, "late", tensor_parallel_size=2)
    assert engine(prompts, params) == Engine(target)(prompts, params)
    with pytest.raises(ConfigError, match="lambda"):
        engine([[5, 6]], [SamplingParams(logits_processors=[lambda ids, logits: logits])])
    assert engine(prompts[:1], params[:1]) == engine(prompts[:1], params[:1])  # it goes on

    pids = engine.llm.llm_engine.worker_pids
    assert all(map(alive, pids))

    async def serve():
        llm = AsyncLLM.from_engine(engine.llm.llm_engine)
        streams = [await llm.add_request(name, {"prompt_token_ids": [5, 6, 7]}, LONG) for name in ("a", "b")]
        os.kill(pids[0], signal.SIGKILL)
        found = []
        for stream in streams:
            with pytest.raises(EngineDeadError) as raised:
                async for _ in stream:
                    pass
            found.append(str(raised.value))
        await asyncio.to_thread(llm.shutdown)
        return found

    started = time.monotonic()
    found = asyncio.run(serve())
    assert time.monotonic() - started < SOON
    assert all("rank 1" in message and "signal 9" in message for message in found), found
    assert gone(pids)
    with pytest.raises(WorkerDied, match="rank 1"):
        engine.llm.llm_engine.step()


SCRIPT = """
import os, signal, sys
from specdecode import LLM, SamplingParams
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell runs in the background
llm = LLM(sys.argv[1], tensor_parallel_size=2, dtype="float32", device="cpu", skip_tokenizer_init=True,
          num_gpu_blocks_override=400, max_model_len=500)
print(*llm.llm_engine.worker_pids, flush=True)
prompt = [{"prompt_token_ids": [5, 6, 7]}]
long = SamplingParams(max_tokens=480, n=8, temperature=1.0, ignore_eos=True)
engine, step = llm.llm_engine, llm.llm_engine.step
def at_the_fifth_step(act):
    steps = iter(range(5))
    def counted():
        if next(steps, None) == 4:
            act()
        return step()
    engine.step = counted
at_the_fifth_step(lambda: os.killpg(0, signal.SIGINT))  # as a terminal does
try:
    llm.generate(prompt, long, use_tqdm=False)
except KeyboardInterrupt:
    (output,) = llm.generate(prompt, SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    print("went on", len(output.outputs[0].token_ids), flush=True)
if sys.argv[2] == "killed":
    at_the_fifth_step(lambda: os.kill(os.getpid(), signal.SIGKILL))
    llm.generate(prompt, long, use_tqdm=False)
"""


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("killed", -signal.SIGKILL),
        pytest.param("by itself", 0, marks=pytest.mark.sweep),
    ],
)
def test_ctrl_c_stops_a_call_and_no_process_outlives_the_first(target, end, status):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(target), end],
        capture_output=True, text=True, timeout=120, start_new_session=True,
    )  # fmt: skip
    assert done.returncode == status, done.stderr
    pids, went_on = done.stdout.splitlines()
    assert went_on == "went on 4"
    assert gone(map(int, pids.split()))
    assert "Traceback" not in done.stderr
