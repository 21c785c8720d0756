"""What is known of each installed plugin and method."""

from __future__ import annotations

import enum

import attrs

from specdecode.contract import ProposerSpec


class Status(enum.StrEnum):
    """How a plugin or one of its methods stands."""

    OK = "ok"
    BLOCKED = "blocked"  #: not wanted by the user; never imported
    INCOMPATIBLE = "incompatible"  #: made for another core or contract
    BROKEN = "broken"  #: raised while it loaded, or does not keep the rules of a plugin
    CONFLICT = "conflict"  #: another plugin provides a method of the same name
    UNAVAILABLE = "unavailable"  #: (methods only) a module that the method declares is not installed


@attrs.frozen(kw_only=True)
class PluginRecord:
    """One provider: an entry point of a distribution, or an object registered in this process."""

    name: str  #: the family: the entry point's name
    dist: str
    version: str
    target: str  #: the module that the entry point names
    status: Status
    detail: str = ""
    methods: tuple[str, ...] = ()  #: names of the methods it provides, if it loaded


@attrs.frozen(kw_only=True)
class MethodRecord:
    """One method of a plugin that loaded."""

    method: str
    plugin: str
    dist: str
    version: str
    status: Status  #: ok, unavailable or conflict
    detail: str
    summary: str


@attrs.frozen(kw_only=True)
class Provided:
    """A method together with who provides it."""

    spec: ProposerSpec
    dist: str
    version: str
    family: str

    @property
    def provider(self) -> str:
        """Distribution and version, as messages name them."""
        return f"{self.dist} {self.version}".rstrip()
