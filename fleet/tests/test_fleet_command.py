"""``specdecode fleet`` as users run it: a cluster of its own each time, so only when it is asked for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="no Ray")
httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi")

pytestmark = pytest.mark.sweep

COMMAND = [sys.executable, "-c", "from specdecode.cli import main; main()", "fleet"]
SMALL = ["--device", "cpu", "--dtype", "float32"]
PORT = 28431


def test_serve_ends_well_with_what_it_accepted(fleet_model: Path, tmp_path: Path):
    options = ["--port", str(PORT), "--replicas", "2", "--fleet-option", "cpus_per_replica=0.5"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([*COMMAND, "serve", str(fleet_model), *SMALL, *options], stderr=log)
    url = f"http://127.0.0.1:{PORT}"
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.3)
        body = {"prompt": "abc", "max_tokens": 900, "temperature": 0, "ignore_eos": True, "stream": True}
        lines: list[str] = []
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            for line in response.iter_lines():
                if not lines:
                    threading.Timer(0.05, process.send_signal, [signal.SIGTERM]).start()
                lines.append(line)
        assert lines[-2:] == ["data: [DONE]", ""]
        assert process.wait(60) == 0
    finally:
        process.kill()


def test_batch_writes_a_line_for_each_row(fleet_model: Path, tmp_path: Path):
    rows = [{"prompt": "abc"}, {"messages": [{"role": "user", "content": "hi"}]}, {"prompt": "x" * 2000}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = ["--data", str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [*COMMAND, "batch", str(fleet_model), *files, *SMALL, "--sampling", "max_tokens=5"],
        capture_output=True,
        text=True,
        timeout=180,
        env=os.environ,
    )
    assert done.returncode == 0, done.stderr
    assert "3 rows, 1 of them with an error" in done.stdout
    told = [json.loads(line) for path in (tmp_path / "out").iterdir() for line in path.open()]
    assert sorted(len(row["token_ids"]) for row in told) == [0, 5, 5]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["serve", "/no/model", "--port", str(PORT)],
            "could not start the fleet: model '/no/model' does not exist",
        ),
        (["batch", "/no/model", "--data", "in.jsonl", "--out", "out"], "model '/no/model' does not exist"),
        (["batch", "/no/model", "--data", "/no/data", "--out", "out"], "--data: cannot read /no/data"),
    ],
)
def test_what_stops_it_is_told_in_a_line(arguments, says, tmp_path: Path):
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": "abc"}) + "\n")
    done = subprocess.run(
        [*COMMAND, *arguments, *SMALL], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ") and says in last
