"""Where the server listens: bound before the model is loaded, listened on when the server is ready."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterator
from typing import Any

import attrs

from ..contract import ConfigError

#: A name may have an address of a kind that this machine has not.
_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


@attrs.define
class Address:
    """Sockets bound to all addresses of a host; as long as they do not listen, clients are refused."""

    host: str
    port: int  #: the one that was chosen, where any would do
    sockets: list[socket.socket] = attrs.field(factory=list)

    @property
    def url(self) -> str:
        host = self.host or self.sockets[0].getsockname()[0]
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def before_listening(self) -> None:
        """Let the next server bind while connections of this one still time out."""
        if os.name == "posix":
            for one in self.sockets:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

    def refused(self, error: OSError) -> ConfigError:
        """Why nothing can listen there, in a line."""
        return ConfigError(
            f"--host {self.host} --port {self.port} cannot be listened on: {error.strerror}; give an address "
            "of this machine and a free port (--port 0: any)"
        )


@contextlib.contextmanager
def bound(host: str, port: int) -> Iterator[Address]:
    """Bind sockets, which are closed at the end.

    Args:
        host: a name or an address; empty: every address of this machine.
        port: 0 for any free one, the same for all addresses.

    Raises:
        ConfigError: nothing can be bound there; says why.
    """
    with contextlib.ExitStack() as held:
        address = Address(host, port)
        try:
            _bind_all(address, held)
        except OSError as error:
            raise address.refused(error) from None
        yield address


def _bind_all(address: Address, held: contextlib.ExitStack) -> None:
    fault = None
    found = socket.getaddrinfo(
        address.host or None, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    for family, kind, protocol, _, (name, _, *rest) in found:
        try:
            one = held.enter_context(socket.socket(family, kind, protocol))
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            _bind(one, (name, address.port, *rest))
            address.port = one.getsockname()[1]
            address.sockets.append(one)
        except OSError as error:
            if error.errno not in _NOT_HERE:
                raise
            fault = error
    if fault is not None and not address.sockets:
        raise fault


def _bind(one: socket.socket, where: Any) -> None:
    """Bind it for ourselves alone; with others only where an earlier server's connections are timing out.

    Sockets with ``SO_REUSEADDR`` share a port as long as none of them listens: of two servers the second
    would learn of the first when it has loaded its model.
    """
    try:
        one.bind(where)
    except OSError as error:
        if error.errno != errno.EADDRINUSE or os.name != "posix":
            raise
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind(where)
