"""A tiny model that speaks in circles, so that prompt lookup has drafts accepted, and engines on it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

NGRAM = {"method": "ngram", "num_speculative_tokens": 4}


@pytest.fixture(scope="session")
def serving_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from specdecode.testing.tiny import tiny_checkpoint

    torch.set_num_threads(1)
    return tiny_checkpoint(
        tmp_path_factory.mktemp("serving") / "tiny", output_scale=0.3, max_position_embeddings=1024
    )


@pytest.fixture(scope="session")
def make_llm(serving_model: Path) -> Callable[..., Any]:
    """An ``AsyncLLM`` with changed arguments; its maker shuts it down."""
    from specdecode import AsyncLLM

    def make(**changes: Any) -> AsyncLLM:
        fields = {"dtype": "float32", "device": "cpu", "speculative_config": NGRAM} | changes
        return AsyncLLM(str(serving_model), **fields)

    return make


@pytest.fixture(scope="module")
def llm(make_llm: Callable[..., Any]) -> Iterator[Any]:
    llm = make_llm()
    yield llm
    llm.shutdown()
    assert not llm.engine.core.scheduler.has_unfinished
    llm.engine.core.scheduler.pool.check([])


class Served:
    """A server in a thread of this process, with real sockets."""

    def __init__(self, llm: Any, **settings: Any) -> None:
        import threading

        import uvicorn
        from specdecode.serve.app import make_app
        from specdecode.serve.run import KEEP_ALIVE
        from specdecode.serve.settings import ServerSettings

        self.llm = llm
        settings = {"served_model_name": ("tiny",)} | settings
        self.app = make_app(llm, ServerSettings(**settings))
        self.service = self.app.state.service
        config = uvicorn.Config(
            self.app,
            host="127.0.0.1",
            port=0,
            log_level="warning",
            lifespan="off",
            timeout_keep_alive=KEEP_ALIVE,
        )
        self.server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self.server.run, daemon=True)
        self._thread.start()
        while not self.server.started:
            assert self._thread.is_alive(), "the server did not start"
            time.sleep(0.005)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def client(self, key: str = "none") -> Any:
        import openai

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    def http(self, **options: Any) -> Any:
        import httpx

        return httpx.Client(base_url=self.url, timeout=60, **options)

    def wait_idle(self, seconds: float = 3.0) -> None:
        """Raise AssertionError if something runs ``seconds`` from now."""
        core, deadline = self.llm.engine.core, time.monotonic() + seconds
        while core.scheduler.has_unfinished or core.outputs or self.service.num_open:
            left = [len(core.scheduler.running), len(core.scheduler.waiting), self.service.num_open]
            assert time.monotonic() < deadline, f"still running, waiting, open: {left}"
            time.sleep(0.005)

    def stop(self) -> None:
        self.server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()


@pytest.fixture(scope="module")
def serve() -> Iterator[Callable[..., Served]]:
    """Serve an ``AsyncLLM`` with settings, until the tests of the file are over."""
    for package in ("fastapi", "uvicorn", "openai", "httpx"):
        pytest.importorskip(package)
    running: list[Served] = []

    def start(llm: Any, **settings: Any) -> Served:
        running.append(Served(llm, **settings))
        return running[-1]

    yield start
    for served in running:
        served.stop()


@pytest.fixture(scope="module")
def served(llm: Any, serve: Callable[..., Served]) -> Served:
    return serve(llm)


@pytest.fixture(scope="module")
def client(served: Served) -> Any:
    return served.client()


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """``specdecode serve`` logs all to a handler of its own; run in this process, it would go on doing so."""
    import logging

    root, http = logging.getLogger(), logging.getLogger("httpx")
    handlers, levels = list(root.handlers), (root.level, http.level)
    yield
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    http.setLevel(levels[1])
