"""Loading one plugin under guard: import, register, collect its methods, check them."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import Any

import attrs
import pluggy

from specdecode.config.fields import hints_of
from specdecode.config.speculative import POLICY_KEYS
from specdecode.contract import API, ProposerSpec
from specdecode.contract.errors import FAULTS

from . import hookspecs
from .discovery import Candidate, refusal
from .errors import PluginError
from .markers import GROUP, PREFIX
from .records import Provided, Status

#: Contract numbers this core accepts: its own and the one before it.
ACCEPTED_API = tuple(number for number in (API - 1, API) if number >= 1)

_HOOKS = tuple(name for name in vars(hookspecs) if name.startswith(PREFIX))


@attrs.frozen(kw_only=True)
class Family:
    """One provider after loading: where it came from, what came of it, and its methods."""

    candidate: Candidate
    status: Status = Status.OK
    detail: str = ""
    methods: tuple[Provided, ...] = ()
    plugin: Any = None  #: the registered module or object; None if it did not load

    @property
    def name(self) -> str:
        return self.candidate.name

    @property
    def dist(self) -> str:
        return self.candidate.dist


def new_registry() -> pluggy.PluginManager:
    registry = pluggy.PluginManager(GROUP)
    registry.add_hookspecs(hookspecs)
    return registry


def load_candidate(
    registry: pluggy.PluginManager, candidate: Candidate, *, core: str | None, blocked: str, strict: bool
) -> Family:
    """Load a discovered plugin; whatever is wrong with it becomes the status of the family returned.

    Args:
        registry: where its hooks are registered.
        core: version of the core that is installed, or None if that is not known.
        blocked: why the user does not want it; empty if he does.
        strict: raise instead of recording, for plugins that are not blocked.
    """
    if blocked:
        return Family(candidate=candidate, status=Status.BLOCKED, detail=blocked)
    try:
        if candidate.entry_point is None:
            raise PluginError(candidate.fault)
        if reason := refusal(candidate.requires, core):
            raise PluginError(reason, Status.INCOMPATIBLE)
        plugin = _guarded(candidate.entry_point.load, candidate.target)
        return add_plugin(registry, plugin, candidate)
    except PluginError as error:
        if strict:
            fault = error.__cause__ or error
            fault.add_note(f"while loading plugin {candidate.label}")
            raise fault from None
        return Family(candidate=candidate, status=error.status, detail=str(error))


def add_plugin(registry: pluggy.PluginManager, plugin: Any, candidate: Candidate) -> Family:
    """Register ``plugin`` and collect its methods; nothing stays registered if that fails.

    Raises:
        PluginError: the fault, with the plugin's own exception as the cause.
    """
    key, target = candidate.key, candidate.target
    try:
        _guarded(lambda: registry.register(plugin, name=key), target)
        _check_hooks(registry, plugin, target)
        specs = _guarded(lambda: _collect(registry, plugin, target), target)
        _guarded(lambda: _check_specs(specs), target)
    except PluginError:
        if registry.has_plugin(key):
            registry.unregister(name=key)
        raise
    methods = tuple(
        Provided(spec=spec, dist=candidate.dist, version=candidate.version, family=candidate.name)
        for spec in specs
    )
    if detail := _ageing(specs):
        warnings.warn(f"plugin {candidate.label} is {detail}", DeprecationWarning, stacklevel=2)
    return Family(candidate=candidate, detail=detail, methods=methods, plugin=plugin)


def _ageing(specs: Iterable[ProposerSpec]) -> str:
    """What to say of a plugin that is accepted, and will not be by the next contract; empty: nothing."""
    old = sorted({spec.api for spec in specs if spec.api < API})
    if not old:
        return ""
    return (
        f"written for contract api {', '.join(map(str, old))}, which a core of api {API + 1} will refuse: "
        f"upgrade it to a release for api {API}"
    )


def _guarded(action: Callable[[], Any], target: str) -> Any:
    try:
        return action()
    except PluginError:
        raise
    except FAULTS as error:
        raise PluginError(f"{type(error).__name__} in {target}: {error}") from error


def _check_hooks(registry: pluggy.PluginManager, plugin: Any, target: str) -> None:
    """Refuse hooks that core does not have, and functions named like hooks that are not marked."""
    try:
        registry.check_pending()
    except pluggy.PluginValidationError as error:
        unknown = [hook.name for hook in registry.get_hookcallers(plugin) or () if not hook.has_spec()]
        raise PluginError(f"unknown hook in {target}: {', '.join(map(_with_nearest, unknown))}") from error
    unmarked = [
        name
        for name in dir(plugin)
        if name.startswith(PREFIX)
        and callable(getattr(plugin, name))
        and registry.parse_hookimpl_opts(plugin, name) is None
    ]
    if unmarked:
        raise PluginError(f"{', '.join(unmarked)} in {target} lacks @hookimpl (from specdecode.plugins)")


def _with_nearest(hook: str) -> str:
    near = difflib.get_close_matches(hook, _HOOKS, n=1)
    return f"{hook} (did you mean {near[0]}?)" if near else f"{hook} (hooks: {', '.join(_HOOKS)})"


def _collect(registry: pluggy.PluginManager, plugin: Any, target: str) -> list[Any]:
    """All specs of one plugin, its generator run to the end."""
    hook = registry.hook.specdecode_proposers
    specs: list[Any] = []
    for implementation in hook.get_hookimpls():
        if implementation.plugin is plugin:
            yielded = implementation.function()
            if not isinstance(yielded, Iterable):
                remedy = ", returned: write yield" if isinstance(yielded, ProposerSpec) else ""
                raise PluginError(
                    f"specdecode_proposers in {target} must yield ProposerSpecs, got "
                    f"{type(yielded).__name__}{remedy}"
                )
            specs += yielded
    return specs


def _check_specs(specs: list[Any]) -> None:
    names: set[str] = set()
    for spec in specs:
        if not isinstance(spec, ProposerSpec):
            raise PluginError(f"specdecode_proposers must yield ProposerSpecs, got {type(spec).__name__}")
        if spec.api not in ACCEPTED_API:
            accepted = ", ".join(map(str, ACCEPTED_API))
            raise PluginError(
                f"contract api {spec.api!r}; this core accepts {accepted}{_api_remedy(spec.api)}",
                Status.INCOMPATIBLE,
            )
        if not isinstance(spec.name, str) or not spec.name or ":" in spec.name:
            raise PluginError(
                f"a method's name must be a non-empty string without a colon, got {spec.name!r}"
            )
        if spec.name in names:
            raise PluginError(f"yields method {spec.name!r} twice")
        names.add(spec.name)
        if not (isinstance(spec.config, type) and attrs.has(spec.config)):
            raise PluginError(f"config of method {spec.name!r} must be an attrs class, got {spec.config!r}")
        if taken := sorted({field.name for field in attrs.fields(spec.config)} & set(POLICY_KEYS)):
            raise PluginError(f"config of method {spec.name!r} declares {', '.join(taken)}, which core owns")
        for part in ("needs", "build", "recognize"):
            if not callable(function := getattr(spec, part)):
                raise PluginError(f"{part} of method {spec.name!r} must be a function, got {function!r}")
        if isinstance(spec.imports, str) or not all(isinstance(module, str) for module in spec.imports):
            raise PluginError(
                f"imports of method {spec.name!r} must be a tuple of modules' names, got {spec.imports!r}"
            )
        hints_of(spec.config)  # an annotation that cannot be resolved is found here, not in a user's hands


def _api_remedy(api: Any) -> str:
    if not isinstance(api, int):
        return ", an integer"
    if api > API:
        return f": upgrade specdec-core, or install a release of the plugin for api {API}"
    return f": install a release of the plugin for api {API}"


def missing_imports(spec: ProposerSpec) -> list[str]:
    """The modules of ``spec.imports`` that are not installed; nothing is imported to find out."""
    return [module for module in spec.imports if not _installed(module.partition(".")[0])]


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ValueError:  # it is imported already and carries no spec
        return True
