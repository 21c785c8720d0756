"""The plugin manager: what is installed, how it stands, and who provides a method."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from packaging.utils import canonicalize_name

from specdecode.contract import CheckpointInfo, ConfigError
from specdecode.contract.errors import FAULTS

from .discovery import Candidate, core_version, discover
from .errors import PluginError
from .loading import Family, add_plugin, load_candidate, missing_imports, new_registry
from .records import MethodRecord, PluginRecord, Provided, Status
from .resolution import recognize, resolve

_log = logging.getLogger(__name__)

#: Comma-separated plugins to load, all others are blocked; set but empty: none.
ALLOW_VARIABLE = "SPECDECODE_PLUGINS"
#: 1: an error in a plugin is raised while plugins load, and not recorded.
STRICT_VARIABLE = "SPECDECODE_STRICT_PLUGINS"

#: Distribution of plugins that were registered in this process.
IN_PROCESS = "in-process"


class PluginManager:
    """Loads the installed plugins once, on first use, and survives each that is broken.

    A plugin is named by its entry point or by its distribution, so that of two distributions with the same
    entry name either can be blocked.

    Args:
        disabled: plugins that are not to be imported.
        allow: the only plugins to import; None: what ``SPECDECODE_PLUGINS`` lists, all if it is not set.
        strict: raise what a plugin raises; None: whether ``SPECDECODE_STRICT_PLUGINS`` is 1.
    """

    def __init__(
        self, disabled: Iterable[str] = (), allow: Iterable[str] | None = None, strict: bool | None = None
    ) -> None:
        self._disabled = _names(disabled)
        self._allow_from = "the allow list"
        if allow is None and (listed := os.environ.get(ALLOW_VARIABLE)) is not None:
            allow, self._allow_from = listed, ALLOW_VARIABLE
        self._allow = None if allow is None else _names(allow)
        self._strict = _flag(STRICT_VARIABLE) if strict is None else strict
        self._lock = threading.RLock()
        self._registry = new_registry()
        self._families: list[Family] = []
        self._loaded = False

    @property
    def strict(self) -> bool:
        """Whether faults of plugins are raised rather than recorded."""
        return self._strict

    # -- loading ----------------------------------------------------------------------------------------
    def load(self) -> None:
        """Find and load the installed plugins; what was loaded before stays as it is.

        Raises:
            Exception: (strict only) what the first faulty plugin raised; the next call tries again.
        """
        with self._lock:
            if self._loaded:
                return
            core = core_version()
            registry = new_registry()
            families = [
                load_candidate(
                    registry,
                    candidate,
                    core=core,
                    blocked=self._blocked(candidate.name, candidate.dist),
                    strict=self._strict,
                )
                for candidate in sorted(discover(), key=lambda c: (c.name, c.dist))
            ]
            self._registry, self._families, self._loaded = registry, families, True
            self._warn_of_absent(families)

    def register(self, plugin: Any, name: str | None = None) -> PluginRecord:
        """Add a plugin that is no installed distribution: a module, or an object with marked hooks.

        For tests and notebooks. Registering the same object again changes nothing.

        Raises:
            PluginError: it has a fault, or the name is taken by another object.
        """
        with self._lock:
            self.load()
            for family in self._families:
                if family.plugin is plugin:
                    return self._record(family)
            name = name or str(getattr(plugin, "__name__", type(plugin).__name__))
            candidate = Candidate(name=name, dist=IN_PROCESS, version="", target=name)
            if self._registry.has_plugin(candidate.key):
                raise PluginError(
                    f"a plugin named {name!r} is registered already; unregister({name!r}) first"
                )
            family = add_plugin(self._registry, plugin, candidate)
            self._families.append(family)
            return self._record(family)

    def unregister(self, name: str) -> None:
        """Remove a plugin that :meth:`register` added.

        Raises:
            PluginError: there is none of that name.
        """
        with self._lock:
            kept = [family for family in self._families if (family.dist, family.name) != (IN_PROCESS, name)]
            if len(kept) == len(self._families):
                raise PluginError(f"no plugin named {name!r} was registered in this process")
            self._registry.unregister(name=f"{IN_PROCESS}:{name}")
            self._families = kept

    def _blocked(self, name: str, dist: str) -> str:
        keys = {canonicalize_name(name), canonicalize_name(dist)}
        if keys & self._disabled:
            return "disabled by name"
        if self._allow is not None and not keys & self._allow:
            return f"not in {self._allow_from}"
        return ""

    def _warn_of_absent(self, families: list[Family]) -> None:
        installed = {canonicalize_name(key) for family in families for key in (family.name, family.dist)}
        wanted = ((self._disabled, "disabled plugins"), (self._allow or frozenset(), self._allow_from))
        for names, source in wanted:
            for absent in sorted(names - installed):
                _log.warning("%s: no installed plugin or distribution is named %r", source, absent)

    # -- what there is ----------------------------------------------------------------------------------
    @property
    def records(self) -> tuple[PluginRecord, ...]:
        """One record for each provider, loaded or not."""
        return tuple(self._record(family) for family in self._all())

    def methods(self) -> list[MethodRecord]:
        """Every method of every plugin that loaded; one that is provided twice is listed twice."""
        records = []
        for family in self._all():
            for provided in family.methods:
                status, detail = self._standing(provided)
                if family.detail:
                    detail = f"{detail}; {family.detail}"
                records.append(
                    MethodRecord(
                        method=provided.spec.name,
                        plugin=family.name,
                        dist=family.dist,
                        version=family.candidate.version,
                        status=status,
                        detail=detail,
                        summary=provided.spec.summary,
                    )
                )
        return sorted(records, key=lambda record: (record.method, record.dist, record.plugin))

    def provided_by(self, record: PluginRecord) -> list[Provided]:
        """The methods of one provider."""
        return [p for p in self._provided() if (p.family, p.dist) == (record.name, record.dist)]

    def usable(self) -> list[Provided]:
        """Every method that could be used as it is installed, by name."""
        usable = [provided for provided in self._provided() if self._standing(provided)[0] is Status.OK]
        return sorted(usable, key=lambda provided: provided.spec.name)

    def resolve(self, method: str, *, field: str = "method") -> Provided:
        """Who provides ``method``, given as its name, or as ``distribution:name`` where two provide it.

        Args:
            field: what messages call the value.

        Raises:
            ConfigError: nobody does, or two do; says what is installed and what to type.
        """
        return resolve(method, self._provided(), self.records, field)

    def recognize(self, checkpoint: CheckpointInfo) -> Provided:
        """The one method that says a draft checkpoint is its own.

        Raises:
            ConfigError: none does, or several do.
        """
        return recognize(checkpoint, self._provided(), strict=self._strict)

    def recipes(self) -> list[Any]:
        """The training recipes of all plugins; a plugin whose hook raises is logged and left out."""
        return self._offered("specdecode_recipes")

    def executors(self) -> list[Any]:
        """What plugins run the ranks of a model by; a plugin whose hook raises is logged and left out."""
        return self._offered("specdecode_executors")

    def add_commands(self, subcommands: Any) -> None:
        """Let plugins add their commands to ``subcommands``, a ``typer.Typer``."""
        for _ in self._call("specdecode_cli", subcommands=subcommands):
            continue

    # -- inside -----------------------------------------------------------------------------------------
    def _all(self) -> list[Family]:
        self.load()
        with self._lock:
            return sorted(self._families, key=lambda family: (family.name, family.dist))

    def _offered(self, hook: str) -> list[Any]:
        offered: list[Any] = []
        for family, result in self._call(hook):
            try:
                if not isinstance(result, Iterable) or isinstance(result, str | Mapping):
                    raise PluginError(f"{hook} must yield what it offers, got {type(result).__name__}")
                offered += result
            except FAULTS as error:
                self._report(family, error)
        return offered

    def _provided(self) -> list[Provided]:
        return [provided for family in self._all() for provided in family.methods]

    def _rivals(self, provided: Provided) -> list[Provided]:
        return [
            other
            for other in self._provided()
            if other.spec.name == provided.spec.name and other is not provided
        ]

    def _record(self, family: Family) -> PluginRecord:
        status, detail = family.status, family.detail
        if contested := [provided for provided in family.methods if self._rivals(provided)]:
            status = Status.CONFLICT
            detail = "; ".join(f"{p.spec.name}: {self._standing(p)[1]}" for p in contested)
        return PluginRecord(
            name=family.name,
            dist=family.dist,
            version=family.candidate.version,
            target=family.candidate.target,
            status=status,
            detail=detail,
            methods=tuple(provided.spec.name for provided in family.methods),
        )

    def _standing(self, provided: Provided) -> tuple[Status, str]:
        if rivals := self._rivals(provided):
            others = ", ".join(rival.provider for rival in rivals)
            return Status.CONFLICT, f"also {others}; say {provided.dist}:{provided.spec.name} or --no-plugin"
        if missing := missing_imports(provided.spec):
            noun = "module" if len(missing) == 1 else "modules"
            return Status.UNAVAILABLE, f"{noun} {', '.join(missing)} not found (declared in imports)"
        return Status.OK, provided.spec.summary

    def _call(self, hook: str, **arguments: Any) -> Iterable[tuple[Family, Any]]:
        """Call one hook plugin by plugin, so that a fault is known by its owner."""
        for family in self._all():
            if family.plugin is None:
                continue
            others = [other.plugin for other in self._families if other is not family and other.plugin]
            caller = self._registry.subset_hook_caller(hook, others)
            try:
                for result in caller(**arguments):
                    yield family, result
            except FAULTS as error:
                self._report(family, error)

    def _report(self, family: Family, error: BaseException) -> None:
        if self._strict:
            error.add_note(f"in the plugin {family.candidate.label}")
            raise error
        _log.error("plugin %s: %s: %s", family.candidate.label, type(error).__name__, error)


def _names(names: Iterable[str]) -> frozenset[str]:
    """Canonical names; one string is a comma-separated list."""
    if isinstance(names, str):
        names = names.split(",")
    return frozenset(canonicalize_name(name.strip()) for name in names if name.strip())


def _flag(variable: str) -> bool:
    value = os.environ.get(variable, "").strip().lower()
    if value in ("", "0", "false", "no", "off"):
        return False
    if value in ("1", "true", "yes", "on"):
        return True
    raise ConfigError(f"{variable} must be 1 or 0, got {value!r}")


_default: PluginManager | None = None
_default_lock = threading.Lock()


def default_manager() -> PluginManager:
    """The manager of this process, made on first use from the environment's settings."""
    global _default
    with _default_lock:
        if _default is None:
            _default = PluginManager()
        return _default
