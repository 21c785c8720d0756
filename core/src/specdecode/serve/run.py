"""Runs the server until it is told to end; what it accepted by then is finished first."""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Iterator

import uvicorn

from ..api.async_llm import AsyncLLM
from .address import Address
from .app import make_app
from .settings import ServerSettings

logger = logging.getLogger("specdecode.serve")

#: Seconds that an idle connection is kept. Longer than clients and balancers do, most of which say 5 to 60: a
#: connection that both ends give up at the same moment costs the request that is on its way.
KEEP_ALIVE = 75

#: Seconds after which a thread gives the interpreter to another one that waits for it. With Python's 0.005
#: the engine's thread would wait as long as a step takes whenever the event loop is busy writing.
SWITCH_INTERVAL = 0.0005


class Server(uvicorn.Server):
    """Also ends when the engine has stopped, so that whoever watches the process starts it again."""

    def __init__(self, config: uvicorn.Config, llm: AsyncLLM, address: Address) -> None:
        super().__init__(config)
        self._llm = llm
        self._address = address

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._address.before_listening()
        try:
            await super().startup(sockets)
        except OSError as error:
            raise self._address.refused(error) from None
        logger.info("running on %s (Ctrl-C ends it)", self._address.url)

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self._llm.errored


def run(llm: AsyncLLM, settings: ServerSettings, address: Address, *, drain_timeout: float) -> bool:
    """Serve until SIGTERM or SIGINT, then finish the open requests; False if the engine has stopped.

    Args:
        address: where to listen from now on, which is logged.
        drain_timeout: seconds after which open requests are cut off; a second SIGINT does so at once.
    """
    config = uvicorn.Config(
        make_app(llm, settings),
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=max(1, round(drain_timeout)),
    )
    server = Server(config, llm, address)
    sys.setswitchinterval(SWITCH_INTERVAL)
    with _ends_normally():
        server.run(address.sockets)
    if llm.errored:
        logger.critical("the engine has stopped, and the server with it")
    return server.started and not llm.errored


@contextlib.contextmanager
def _ends_normally() -> Iterator[None]:
    """uvicorn raises the signals that ended it once more when it is done; here they have had their effect."""
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
