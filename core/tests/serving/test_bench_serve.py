"""``specdecode bench serve``: arrivals, percentiles and goodput by hand, and a real server under load."""

from __future__ import annotations

import json
import math
import re
import socket
import threading
from itertools import pairwise

import pytest
from specdecode.bench.load import Run, Timing, arrivals, count_requests
from specdecode.bench.load_report import Objectives, percentiles, row_of
from typer.testing import CliRunner


def timing(ttft, tokens=11, per_token=0.01, **more):
    first = 100 + ttft
    return Timing(
        sent=100.0, first=first, last=first + (tokens - 1) * per_token, tokens=tokens,
        done=first + (tokens - 1) * per_token + 0.001, **more,
    )  # fmt: skip


def test_arrivals_are_a_poisson_process():
    times = arrivals(4.0, 4000, seed=1)
    gaps = [b - a for a, b in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert times[0] == 0.0 and mean == pytest.approx(0.25, rel=0.05)
    spread = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert spread == pytest.approx(mean, rel=0.06)
    assert arrivals(4.0, 10, seed=1) == times[:10] != arrivals(4.0, 10, seed=2)
    assert arrivals(math.inf, 3, seed=1) == [0.0] * 3
    assert [count_requests(2.0, s, 7) for s in (None, 10.0, 0.1)] == [7, 20, 1]
    assert count_requests(math.inf, 10.0, 7) == 7


def test_percentiles():
    assert percentiles([None]) is None
    assert percentiles([0.003]) == {"p50": 3.0, "p95": 3.0, "p99": 3.0}
    found = percentiles([value / 1000 for value in range(101)])
    assert found == pytest.approx({"p50": 50, "p95": 95, "p99": 99})
    assert percentiles([0.0, None, 0.001])["p50"] == pytest.approx(0.5)


def test_a_row_and_its_goodput():
    timings = (
        timing(0.1, gaps=[0.01, 0.03], draft_steps=4, gained=10.0),
        timing(0.5, draft_steps=1, gained=1.0),
        timing(0.1, per_token=0.05),
        timing(0.1, error="status 500"),
        timing(0.1, tokens=1),
    )
    run = Run(side="x", rate=2.0, seconds=2.0, timings=timings)
    row = row_of(run, Objectives())
    assert (row.requests, row.failed, row.requests_per_s, row.goodput) == (5, 1, 2.0, 2.0)
    assert row.output_tokens_per_s == (11 + 11 + 11 + 1) / 2
    assert row.ttft_ms["p50"] == pytest.approx(100) and row.inter_token_ms["p50"] == pytest.approx(10)
    assert row.gap_ms["p50"] == pytest.approx(20) and row.acceptance_length == 11 / 5
    assert row.errors == ("status 500",)
    for objectives, good in (
        (Objectives(ttft_ms=200), 3),
        (Objectives(inter_token_ms=20), 3),
        (Objectives(end_to_end_ms=300), 2),
        (Objectives(ttft_ms=200, inter_token_ms=20), 2),
        (Objectives(ttft_ms=1), 0),
    ):
        assert row_of(run, objectives).goodput == good / 2
    assert row_of(Run(side="x", rate=math.inf, seconds=1.0, timings=timings), Objectives()).rate is None


@pytest.fixture
def bench(served, monkeypatch):
    from specdecode.cli.app import app

    monkeypatch.setenv("COLUMNS", "200")
    common = ("bench", "serve", "--url", served.url, "--max-tokens", "24", "--ignore-eos")
    return lambda *more: CliRunner().invoke(app, [*common, *more])


def test_a_server_under_load(bench, served, tmp_path):
    pytest.importorskip("matplotlib")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a b a b a b a b\nc d c d c d c d\n")
    plot, output = tmp_path / "plot.png", tmp_path / "out.json"
    result = bench(
        "--prompts", str(prompts), "--rate", "50,inf", "--num-requests", "6", "--lengths", "1", "--json",
        "--plot", str(plot), "--output", str(output),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found == json.loads(output.read_text())
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert found["environment"]["model"] == "tiny" and found["environment"]["method"] == "ngram"
    rows = {(row["side"], row["rate"]): row for row in found["rows"]}
    assert rows.keys() == {(side, rate) for side in ("plain", "ngram", "at most 1") for rate in (50.0, None)}
    for (side, _), row in rows.items():
        assert (row["requests"], row["failed"]) == (6, 0)
        assert row["output_tokens_per_s"] == pytest.approx(6 * 24 / row["seconds"])
        assert row["end_to_end_ms"]["p50"] >= row["ttft_ms"]["p50"] > 0
        assert row["end_to_end_ms"]["p99"] >= row["end_to_end_ms"]["p50"]
        assert row["inter_token_ms"]["p99"] >= 0  # 0 where all of an answer came as one piece
        assert row["goodput"] == pytest.approx(row["requests_per_s"])
        assert (row["acceptance_length"] is None) == (side == "plain")
    served.wait_idle()


def test_as_a_table_and_completions(bench):
    result = bench("--no-chat", "--no-compare", "--num-requests", "2", "--rate", "inf", "--task", "chat")
    assert result.exit_code == 0, result.output
    assert "at once" in result.stdout and "served" in result.stdout and "plain" not in result.stdout


def test_requests_that_fail_are_counted_and_told(bench):
    result = bench("--model", "other", "--num-requests", "3", "--rate", "inf", "--json")
    assert result.exit_code == 1
    assert {row["failed"] for row in json.loads(result.stdout.splitlines()[0])["rows"]} == {3}
    assert "'other' is not served here" in result.stderr


def other_server():
    """A server that is not ours: it tells no usage, and has no ``/specdecode/info``."""
    listener = socket.create_server(("127.0.0.1", 0))

    def piece(text):
        return f"data: {json.dumps({'choices': [{'index': 0, 'text': text}]})}\n\n".encode()

    def answer(connection, number):
        with connection:
            asked = b""
            while b"\r\n\r\n" not in asked:
                asked += connection.recv(65536)
            head, _, body = asked.partition(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head.lower())
            while length and len(body) < int(length[1]):  # what is left unread would reset the connection
                body += connection.recv(65536)
            if b"POST" not in asked:
                body = b'{"data": [{"id": "foreign"}]}' if b"/v1/models" in asked else b"{}"
                status = b"200 OK" if b"/v1/models" in asked else b"404 Not Found"
                connection.sendall(
                    b"HTTP/1.1 "
                    + status
                    + b"\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
                    + body
                )
                return
            connection.sendall(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
            )
            for text in ("one ", "", "two ", "three"):
                connection.sendall(piece(text))
            connection.sendall(b"data: [DONE]\n\n")

    def serve():
        number = 0
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(connection, number), daemon=True).start()
            number += 1

    threading.Thread(target=serve, daemon=True).start()
    return listener


def test_servers_of_others():
    pytest.importorskip("httpx")
    from specdecode.cli.app import app

    with other_server() as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/"
        result = CliRunner().invoke(
            app,
            ["bench", "serve", "--url", url, "--no-chat", "--num-requests", "4", "--rate", "inf", "--json"],
        )
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    (row,) = found["rows"]
    assert found["environment"]["model"] == "foreign" and row["side"] == "served"
    assert row["output_tokens_per_s"] * row["seconds"] == pytest.approx(12)  # pieces with text
    assert row["acceptance_length"] is None


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--rate", "0"], "--rate must be numbers above 0"),
        (["--rate", "fast"], "--rate must be numbers above 0"),
        (["--duration", "-1"], "--duration must be above 0"),
        (["--lengths", "0"], "--lengths must be positive integers"),
        (["--task", "none"], "there is no 'none'"),
        (["--plot", "/nowhere/x.png"], "there is no folder /nowhere"),
        (["--output", "/nowhere/x.json"], "there is no folder /nowhere"),
    ],
)
def test_wrong_options(bench, options, says):
    result = bench(*options)
    assert result.exit_code == 1 and says in result.output


def test_a_server_that_is_not_there():
    from specdecode.cli.app import app

    for url, says in (("127.0.0.1:1", "must begin with http://"), ("http://127.0.0.1:1", "cannot be read")):
        result = CliRunner().invoke(app, ["bench", "serve", "--url", url])
        assert result.exit_code == 1 and says in result.output
