"""The replicas that Ray Serve's router knows at present, for the door in the same process.

A module of its own: Ray sends the router's module by value, so that a variable there is not the one that
the door would import.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

#: By application: what tells the names of its replicas.
_known: dict[str, Callable[[], Sequence[str]]] = {}


def announce(app: str, names: Callable[[], Sequence[str]]) -> None:
    """``names`` tells the replicas of ``app`` from now on."""
    _known[app] = names


def present(app: str) -> Sequence[str]:
    """The replicas of ``app``; none before the first request to one."""
    names = _known.get(app)
    return names() if names is not None else ()
