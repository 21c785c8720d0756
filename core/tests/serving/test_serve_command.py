"""``specdecode serve`` as a process of its own: it starts, serves, and ends well when it is told to."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time

import pytest
from specdecode.testing.serving import ServerProcess
from typer.testing import CliRunner

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
httpx = pytest.importorskip("httpx")


@pytest.fixture
def start(serving_model, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with contextlib.ExitStack() as running:
        yield lambda *options: running.enter_context(
            ServerProcess(serving_model, "--device", "cpu", "--dtype", "float32", *options)
        )


def test_sigterm_under_load_finishes_what_was_accepted(start):
    server = start("--spec-method", "ngram", "--spec-tokens", "4")
    body = {"prompt": "a b a b a b ", "max_tokens": 900, "ignore_eos": True, "temperature": 0}
    answers: list[tuple[int, str]] = []
    begun = threading.Semaphore(0)

    def ask(stream: bool) -> None:
        with httpx.Client(base_url=server.url, timeout=120) as http:
            if stream:
                with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
                    lines = response.iter_lines()
                    text = next(lines)
                    begun.release()
                    text += "".join(lines)
            else:
                begun.release()
                response = http.post("/v1/completions", json=body)
                text = response.text
            answers.append((response.status_code, text))

    asking = [threading.Thread(target=ask, args=(number % 2 == 0,)) for number in range(8)]
    for one in asking:
        one.start()
    for _ in asking:
        assert begun.acquire(timeout=60)
    with httpx.Client(base_url=server.url) as http:
        while http.get("/health").json()["open_requests"] < 8:
            time.sleep(0.005)
    assert server.end(signal.SIGTERM) == 0
    for one in asking:
        one.join(60)
    assert len(answers) == 8
    for status, text in answers:
        assert status == 200 and '"finish_reason":"length"' in text
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health")
    told = [line for line in server.lines if line["message"] == "request"]
    assert [line["completion_tokens"] for line in told] == [900] * 8


def test_what_takes_too_long_to_drain_is_cut_off(start):
    server = start("--drain-timeout", "1", "--engine-option", "max_model_len=1024")
    body = {"prompt": "a", "max_tokens": 1000, "ignore_eos": True, "n": 64, "temperature": 1}

    def ask() -> None:
        with pytest.raises(httpx.HTTPError):
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).raise_for_status()

    asking = threading.Thread(target=ask)
    asking.start()
    while httpx.get(f"{server.url}/health").json()["open_requests"] < 1:
        time.sleep(0.005)
    began = time.monotonic()
    assert server.end(signal.SIGINT) == 0
    assert time.monotonic() - began < 30
    asking.join(60)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--max-waiting", "0"], "max_waiting must be at least 1"),
        (["--reasoning-parser", "none"], "reasoning_parser must be one of think"),
        (["--request-timeout", "0"], "request_timeout must be above 0"),
        (["--api-key", "two words"], "api-key must be ASCII text without blanks"),
        (["--engine-option", "max_num_seqs"], "--engine-option must be KEY=VALUE"),
        (["--engine-option", "max_num_seq=3"], "max_num_seqs"),
        (["--log-format", "xml"], "--log-format must be text or json"),
        (["--chat-template", "/nowhere"], "cannot read /nowhere"),
        (["--drain-timeout", "-1"], "--drain-timeout must be seconds, at least 0, got -1"),
        (["--drain-timeout", "inf"], "--drain-timeout must be seconds, at least 0, got inf"),
        (["--host", "256.1.1.1"], "--host 256.1.1.1 --port 0 cannot be listened on"),
        (["--host", "192.0.2.1"], "--host 192.0.2.1 --port 0 cannot be listened on: Cannot assign"),
    ],
)
def test_wrong_options_are_told_before_the_model_is_loaded(serving_model, options, says, monkeypatch):
    import specdecode.api.async_llm
    from specdecode.cli.app import app

    def never(*_):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(specdecode.api.async_llm, "LLMEngine", never)
    monkeypatch.setenv("COLUMNS", "200")
    result = CliRunner().invoke(app, ["serve", str(serving_model), "--port", "0", *options])
    assert result.exit_code == 1 and says in result.output


def test_a_port_that_is_taken_is_told_before_the_model_is_loaded(serving_model):
    from specdecode.cli.app import app

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = CliRunner().invoke(app, ["serve", str(serving_model / "nothing"), "--port", str(port)])
    assert result.exit_code == 1 and f"--port {port} cannot be listened on: Address already" in result.output


def test_a_server_that_loads_its_model_holds_its_port_and_refuses_clients(serving_model, monkeypatch):
    import specdecode
    from specdecode.cli.app import app
    from specdecode.contract import ConfigError

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = ["serve", str(serving_model), "--port", str(port)]
    seen = []

    def loading(*_, **__):
        if not seen:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port))
            seen.append(CliRunner().invoke(app, command))
        raise ConfigError("enough")

    monkeypatch.setattr(specdecode, "AsyncLLM", loading)
    assert "enough" in CliRunner().invoke(app, command).output
    (second,) = seen
    assert second.exit_code == 1 and f"--port {port} cannot be listened on: Address already" in second.output
    socket.create_server(("127.0.0.1", port)).close()  # given back with the error


def test_the_next_server_binds_while_connections_of_the_last_one_time_out():
    from specdecode.serve.address import bound

    with bound("127.0.0.1", 0) as address:
        address.before_listening()
        (listening,) = address.sockets
        listening.listen()
        with socket.create_connection(("127.0.0.1", address.port)) as client:
            listening.accept()[0].close()
            assert client.recv(1) == b""
    with bound("127.0.0.1", address.port) as again:
        assert again.port == address.port
        again.sockets[0].listen()


def test_the_addresses_of_a_name_have_one_port_and_those_of_ipv6_are_urls(monkeypatch):
    from specdecode.serve.address import bound

    if not socket.has_ipv6:
        pytest.skip("no IPv6")
    stream = (socket.SOCK_STREAM, 0, "")
    both = [(socket.AF_INET, *stream, ("127.0.0.1", 0)), (socket.AF_INET6, *stream, ("::1", 0, 0, 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both)
    with bound("a name", 0) as address:
        if len(address.sockets) == 1:
            pytest.skip("no IPv6")
        assert len({one.getsockname()[1] for one in address.sockets}) == 1
        assert address.url == f"http://a name:{address.port}"
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both[1:])
    with bound("::1", 0) as address:
        assert address.url == f"http://[::1]:{address.port}"


def test_what_is_not_installed_is_told(serving_model, monkeypatch):
    import importlib.util

    from specdecode.cli.app import app

    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "uvicorn" else real(name, *rest)
    )
    result = CliRunner().invoke(app, ["serve", str(serving_model)])
    assert result.exit_code == 1 and "pip install 'specdec-core[serve]'" in result.output


def test_a_server_that_warms_up_listens_when_it_has(start):
    server = start("--warm-up", "--max-model-len", "128")
    told = [line["message"] for line in server.lines]
    (warm,) = [place for place, message in enumerate(told) if "to warm up" in str(message)]
    (listens,) = [place for place, message in enumerate(told) if "running on http" in str(message)]
    assert warm < listens
    with httpx.Client(base_url=server.url, timeout=60) as http:
        answer = http.post("/v1/completions", json={"prompt": "a b ", "max_tokens": 4}).json()
    assert (
        answer["usage"]["completion_tokens"] == 4
        and answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    )
    assert server.end() == 0
