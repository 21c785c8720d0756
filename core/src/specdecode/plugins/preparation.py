"""From ``speculative_config`` to a method that is ready to be built: resolve, structure, plan, build."""

from __future__ import annotations

import contextlib
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, Protocol, TypeVar

import attrs

from specdecode.config import Policy, SpeculativeConfig, structure
from specdecode.config.speculative import POLICY_KEYS
from specdecode.contract import (
    CheckpointInfo,
    ConfigError,
    Needs,
    Probs,
    Proposer,
    ProposerSpec,
    SpecdecodeError,
    TargetInfo,
    Unsupported,
)
from specdecode.contract.errors import FAULTS

from .checkpoint import read_checkpoint
from .discovery import missing_requirements
from .errors import PluginError
from .loading import missing_imports
from .manager import PluginManager
from .records import Provided

T = TypeVar("T")

#: What core asks a proposer for.
_MEMBERS = tuple(name for name in vars(Proposer) if not name.startswith("_"))

#: What messages call the user's mapping.
ROOT = "speculative_config"


class CheckpointReader(Protocol):
    """Finds a draft checkpoint and reads its headers, as :func:`read_checkpoint` does."""

    def __call__(
        self, path: str | Path, revision: str | None = None, *, field: str = ...
    ) -> CheckpointInfo: ...


@attrs.frozen(kw_only=True, eq=False)
class Prepared:
    """A method chosen, its configuration checked and its needs known; nothing heavy is imported yet."""

    method: str
    policy: Policy
    config: Any  #: an instance of the method's config class
    needs: Needs
    provided: Provided
    _plan: _Plan = attrs.field(repr=False)

    def build(self, max_num_seqs: int) -> Proposer:
        """The proposer for at most ``max_num_seqs`` rows a step. Imports what the method needs.

        Raises:
            Unsupported, ConfigError: the method's own reason.
            PluginError: the method broke the contract; its exception is the cause.
        """
        return self._plan.build(self.needs, max_num_seqs)

    @contextlib.contextmanager
    def outlived(self, part: str) -> Iterator[None]:
        """Within ``part`` of the proposer; what it raises is passed on, for its kind tells a remedy.

        Raises:
            PluginError: it called ``sys.exit()``.
        """
        try:
            yield
        except SystemExit as error:
            raise PluginError(f"{_who(self.provided)}: {part} raised SystemExit: {error}") from error

    def narrowed(self, most: int | None) -> Prepared:
        """The same, with at most ``most`` drafts a row (``Proposer.most``).

        Raises:
            PluginError: that is none, or more than the method declared.
        """
        if most is None:
            return self
        if not isinstance(most, Integral) or not 1 <= most <= self.needs.width:
            raise PluginError(
                f"the method {self.method!r} declares Needs.width={self.needs.width}, and behind bind "
                f"Proposer.most={most!r}: it must be an integer between 1 and that"
            )
        most = int(most)
        return attrs.evolve(
            self, needs=attrs.evolve(self.needs, width=most, depth=min(self.needs.depth, most))
        )


def prepare(
    manager: PluginManager,
    speculative_config: SpeculativeConfig | Mapping[str, Any] | str,
    target: TargetInfo,
    *,
    reader: CheckpointReader = read_checkpoint,
) -> Prepared:
    """Choose and check the method that ``speculative_config`` asks for.

    Args:
        manager: who knows the installed methods.
        speculative_config: what the user gave.
        target: the model to speculate for.
        reader: how a draft checkpoint is found and read.

    Raises:
        ConfigError: every fault of the configuration at once.
        Unsupported: the method cannot work with this target.
        PluginError: the method's plugin broke the contract.
    """
    given = SpeculativeConfig.of(speculative_config)
    checkpoints = _Checkpoints(reader)
    faults: list[str] = []
    policy = _collect(faults, lambda: structure(Policy, given.policy_keys, ROOT))
    provided = _collect(faults, lambda: _choose(manager, given, checkpoints))
    config = None
    if provided is not None:
        chosen = provided
        config = _collect(
            faults, lambda: _structured(chosen, given.method_keys, ROOT, neighbours=POLICY_KEYS)
        )
    if faults or policy is None or provided is None:
        raise ConfigError(*faults)
    plan = _Plan.of(manager, provided, config, target, checkpoints, ROOT, policy.probs)
    return Prepared(
        method=provided.spec.name,
        policy=policy,
        config=config,
        needs=plan.needs(),
        provided=provided,
        plan=plan,
    )


def _structured(
    provided: Provided, mapping: Mapping[str, Any], path: str, *, neighbours: Sequence[str] = ()
) -> Any:
    """The method's config; what is no fault of the user's in making it is the plugin's."""
    kind: type[Any] = provided.spec.config
    return _guarded("config", provided, lambda: structure(kind, mapping, path, neighbours=neighbours))


def _collect(faults: list[str], action: Callable[[], T]) -> T | None:
    """What ``action`` gives; if it is refused, None, and the reasons are added to ``faults``."""
    try:
        return action()
    except ConfigError as error:
        faults += error.faults
        return None


def _choose(manager: PluginManager, given: SpeculativeConfig, checkpoints: _Checkpoints) -> Provided | None:
    """The method named, or the one that recognises the draft checkpoint; None if the name is no string."""
    if given.method is not None and not isinstance(given.method, str):
        return None  # which the policy's own fault is about
    return _named(manager, given.method, given, checkpoints, ROOT, f"{ROOT}.method")


def _named(
    manager: PluginManager,
    method: Any,
    mapping: Mapping[str, Any],
    checkpoints: _Checkpoints,
    path: str,
    field: str,
) -> Provided:
    """The method named, or the one that recognises the draft checkpoint; ``field``: what messages call it."""
    if method is not None:
        if not isinstance(method, str):
            raise ConfigError(f"{field} must be a string, got {method!r}")
        return manager.resolve(method, field=field)
    if mapping.get("model") is None:
        installed = sorted({record.method for record in manager.methods()})
        raise ConfigError(
            f"{path} names neither method nor model; set {path}.method to one of the installed methods: "
            f"{', '.join(installed) or 'none'}"
        )
    return manager.recognize(checkpoints.read(mapping["model"], mapping.get("revision"), path))


class _Checkpoints:
    """Checkpoints, each read once."""

    def __init__(self, reader: CheckpointReader) -> None:
        self._reader = reader
        self._known: dict[tuple[str, str | None], CheckpointInfo] = {}

    def read(self, model: Any, revision: Any, path: str) -> CheckpointInfo:
        for name, value in (("model", model), ("revision", revision)):
            if not isinstance(value, str) and (name == "model" or value is not None):
                raise ConfigError(f"{path}.{name} must be a string, got {value!r}")
        return self._once(model, revision, f"{path}.model")

    def target(self, target: TargetInfo) -> CheckpointInfo:
        """The target's own."""
        return self._once(target.path, None, "model")

    def _once(self, model: str, revision: str | None, field: str) -> CheckpointInfo:
        key = (model, revision)
        if key not in self._known:
            self._known[key] = self._reader(model, revision, field=field)
        return self._known[key]


@attrs.define(kw_only=True, eq=False)
class _Plan:
    """One method about to be used; what its ``needs`` is shown (``PlanContext``)."""

    target: TargetInfo
    draft: CheckpointInfo | None
    probs: Probs
    _manager: PluginManager
    _provided: Provided
    _config: Any
    _checkpoints: _Checkpoints
    _path: str

    @classmethod
    def of(
        cls,
        manager: PluginManager,
        provided: Provided,
        config: Any,
        target: TargetInfo,
        checkpoints: _Checkpoints,
        path: str,
        probs: Probs,
    ) -> _Plan:
        _check_imports(provided, path)
        model = getattr(config, "model", None)
        draft = (
            checkpoints.read(model, getattr(config, "revision", None), path) if model is not None else None
        )
        return cls(
            target=target,
            draft=draft,
            probs=probs,
            manager=manager,
            provided=provided,
            config=config,
            checkpoints=checkpoints,
            path=path,
        )

    @property
    def target_checkpoint(self) -> CheckpointInfo:
        return self._checkpoints.target(self.target)

    def needs(self) -> Needs:
        needs = self._guarded("needs", lambda: self._provided.spec.needs(self._config, self))
        if not isinstance(needs, Needs):
            raise PluginError(f"{_who(self._provided)}: needs must give a Needs, got {type(needs).__name__}")
        return needs

    @property
    def methods(self) -> Sequence[ProposerSpec]:
        return [provided.spec for provided in self._manager.usable()]

    def needs_of(self, method: str | None, mapping: Mapping[str, Any], field: str = "") -> Needs:
        return self.child(method, mapping, field).needs()

    def child(self, method: str | None, mapping: Mapping[str, Any], field: str) -> _Plan:
        path = f"{self._path}.{field}" if field else f"{self._path}[{method}]"
        name = f"{path}.method" if field else path
        provided = _named(self._manager, method, mapping, self._checkpoints, path, name)
        config = _structured(provided, mapping, path)
        return _Plan.of(self._manager, provided, config, self.target, self._checkpoints, path, self.probs)

    def build(self, needs: Needs, max_num_seqs: int) -> Proposer:
        context = _Build(
            plan=self,
            needs=needs,
            max_num_seqs=max_num_seqs,
            strict=self._manager.strict,
            target=self.target,
            draft=self.draft,
            probs=self.probs,
        )
        built = self._guarded("build", lambda: self._provided.spec.build(self._config, context))
        if fault := self._guarded("what build returned", lambda: _no_proposer(built)):
            raise PluginError(f"{_who(self._provided)}: build must return a Proposer, got {fault}")
        proposer: Proposer = built
        if context.built != len(needs.children):
            raise PluginError(
                f"{_who(self._provided)}: needs declares {len(needs.children)} children, "
                f"build made {context.built}"
            )
        return proposer

    @property
    def provided(self) -> Provided:
        return self._provided

    def _guarded(self, part: str, action: Callable[[], Any]) -> Any:
        """What ``action`` gives. A method takes its keys for the root's: as a child its faults are moved."""
        try:
            return _guarded(part, self._provided, action)
        except ConfigError as error:
            moved = [
                f"{self._path}{fault.removeprefix(ROOT)}"
                if fault.startswith(f"{ROOT}.") and not fault.startswith(self._path)
                else fault
                for fault in error.faults
            ]
            if tuple(moved) == error.faults:
                raise
            raise ConfigError(*moved) from error


@attrs.define(kw_only=True, eq=False)
class _Build:
    """What a method's ``build`` is shown (``BuildContext``)."""

    needs: Needs
    max_num_seqs: int
    strict: bool
    target: TargetInfo
    draft: CheckpointInfo | None
    probs: Probs
    _plan: _Plan
    built: int = attrs.field(default=0, init=False)

    @property
    def target_checkpoint(self) -> CheckpointInfo:
        return self._plan.target_checkpoint

    @property
    def methods(self) -> Sequence[ProposerSpec]:
        return self._plan.methods

    def needs_of(self, method: str | None, mapping: Mapping[str, Any], field: str = "") -> Needs:
        return self._plan.needs_of(method, mapping, field)

    def build(self, method: str | None, mapping: Mapping[str, Any], field: str = "") -> Proposer:
        parent, index = _who(self._plan.provided), self.built
        if index >= len(self.needs.children):
            raise PluginError(
                f"{parent}: build makes {method!r}, which its Needs does not declare; use Needs.union"
            )
        child = self._plan.child(method, mapping, field)
        needs = child.needs()
        if needs != self.needs.children[index]:
            raise PluginError(
                f"{parent}: build makes {method!r} as child {index}, which Needs.children declares otherwise"
            )
        self.built += 1
        return child.build(needs, self.max_num_seqs)


def _no_proposer(built: Any) -> str:
    """What ``built`` is, if it is no proposer, and what to do; empty: it is one, or has all that one has."""
    if isinstance(built, type):
        return f"the class {built.__name__}: return an instance of it"
    missing = [name for name in _MEMBERS if not hasattr(built, name)]
    if not missing:
        return ""
    plain = built is None or isinstance(built, str | int | float | list | tuple | dict)
    return (
        f"{reprlib.repr(built) if plain else type(built).__name__}, which has no {', '.join(missing)}: "
        "subclass specdecode.contract.Proposer, of whose methods only propose must be written"
    )


def _check_imports(provided: Provided, path: str) -> None:
    missing = missing_imports(provided.spec)
    if not missing:
        return
    requirements = " ".join(repr(text) for text in missing_requirements(provided.dist))
    remedy = f"pip install {requirements}" if requirements else "install the distribution that carries it"
    raise ConfigError(
        f"{path}: method {provided.spec.name!r} of {provided.provider} needs the module "
        f"{', '.join(missing)}, which is not installed; {remedy}"
    )


def _guarded(part: str, provided: Provided, action: Callable[[], Any]) -> Any:
    try:
        return action()
    except Unsupported as error:
        raise Unsupported(f"{_who(provided)}: {error}") from error
    except SpecdecodeError:
        raise
    except FAULTS as error:
        raise PluginError(f"{_who(provided)}: {part} raised {type(error).__name__}: {error}") from error


def _who(provided: Provided) -> str:
    return f"method {provided.spec.name!r} of {provided.provider}"
