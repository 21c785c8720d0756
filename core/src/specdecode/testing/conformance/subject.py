"""The proposer under test, and the runs that several checks look at, each made when first asked for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from ...contract import ConfigError, Needs, Proposer, ProposerSpec
from ...plugins import PluginManager, PluginRecord, Prepared, default_manager, prepare
from .toy import Toy, toy

if TYPE_CHECKING:
    from .asks import Ask
    from .driving import Rig
    from .probe import Interference, Log

#: The rule under which the output does not depend on the drafts at all.
INVARIANT = "invariant"

#: The rule under which there is nothing to compare.
SYNTHETIC = "synthetic"

#: First call of ``propose`` that fails in :attr:`Subject.failing`.
FIRST_FAILURE = 3

#: The method's keys, or what makes them of the target that the kit speculates for.
Config = Mapping[str, Any] | Callable[[Toy], Mapping[str, Any]]


@attrs.frozen(kw_only=True)
class Case:
    """A method as the kit is to try it."""

    method: str
    config: Config = attrs.field(factory=dict)
    target: str | Path | Callable[[], str | Path] | None = None  #: checkpoint; None: the kit's own
    device: str = "cpu"  #: where rounding parts no two equal runs; on a GPU it may
    ranks: int = 1  #: that share the target, as threads of this process, on a CPU
    expected_failures: Mapping[str, str] = attrs.field(factory=dict)  #: check id -> reason
    manager: PluginManager | None = attrs.field(default=None, repr=False)  #: None: the process's

    @classmethod
    def of(cls, given: Case | tuple[str, Config]) -> Case:
        """``given``, or a method and its config."""
        return given if isinstance(given, cls) else cls(method=given[0], config=given[1])  # type: ignore[index]


@attrs.frozen(kw_only=True)
class Scene:
    """A run of the engine that is over: what came out, and what the probe saw."""

    asks: Sequence[Ask]
    outputs: Mapping[str, list[int]]
    log: Log


class Subject:
    """One case, prepared.

    Raises:
        ConfigError, Unsupported, PluginError: the method cannot be used with this config and target.
    """

    def __init__(self, case: Case) -> None:
        self.manager = case.manager or default_manager()
        path = case.target() if callable(case.target) else case.target
        self.toy = toy(None if path is None else Path(path), case.device)
        self._case = case
        self.config = dict(case.config(self.toy) if callable(case.config) else case.config)
        self.mapping: dict[str, Any] = {"method": case.method, **self.config}
        info = attrs.evolve(self.toy.info, tensor_parallel_size=case.ranks)
        self.prepared: Prepared = prepare(self.manager, self.mapping, info)
        if self.rule == SYNTHETIC:
            raise ConfigError(
                f"rejection_sample_method={SYNTHETIC!r} writes nobody's text, and the kit compares texts: "
                "choose another rule"
            )

    @property
    def spec(self) -> ProposerSpec:
        return self.prepared.provided.spec

    @property
    def needs(self) -> Needs:
        return self.prepared.needs

    @property
    def record(self) -> PluginRecord:
        """Of the plugin that provides the method."""
        provided = self.prepared.provided
        return next(
            record
            for record in self.manager.records
            if (record.name, record.dist) == (provided.family, provided.dist)
        )

    @property
    def rule(self) -> str:
        """The rule of verification."""
        return self.prepared.policy.rejection_sample_method

    def fixed(self, params: Any) -> bool:
        """Whether a request's tokens, and the noise of its drafts, do not depend on what was drafted."""
        return self.rule == INVARIANT or params.temperature == 0

    def mapping_for(self, toy: Toy) -> Mapping[str, Any] | None:
        """The ``speculative_config`` for another target; None: the case is of one target alone."""
        method, config, target = self._case.method, self._case.config, self._case.target
        return {"method": method, **config(toy)} if callable(config) and target is None else None

    # -- engines --------------------------------------------------------------------------------
    def rig(
        self, interference: Interference | None = None, policy: Mapping[str, Any] | None = None, **engine: Any
    ) -> Rig:
        """A new engine with the proposer.

        Args:
            policy: core's keys of ``speculative_config``, under those of the case.
        """
        from .driving import Rig
        from .probe import Interference

        mapping = {**(policy or {}), **self.mapping}
        engine = {"tensor_parallel_size": self._case.ranks, **engine}
        return Rig.probed(self.toy, mapping, self.manager, interference or Interference(), **engine)

    def run(
        self,
        asks: Sequence[Ask],
        interference: Interference | None = None,
        policy: Mapping[str, Any] | None = None,
        *,
        drive: Callable[[Rig, Sequence[Ask]], dict[str, list[int]]] | None = None,
        **engine: Any,
    ) -> Scene:
        """Run ``asks`` through an engine of their own, all at once or as ``drive`` does."""
        with self.rig(interference, policy, **engine) as rig:
            outputs = drive(rig, asks) if drive else rig.generate(asks)
            return Scene(asks=asks, outputs=outputs, log=rig.log)

    # -- runs that several checks look at -------------------------------------------------------
    @functools.cached_property
    def ordinary(self) -> Scene:
        """All requests at once with chunked prompts, then all again with prefix hits."""
        from .probe import Interference

        return self.run(
            _twice(self.toy.asks), Interference(syncs=True), drive=_waves, max_num_batched_tokens=48
        )

    @functools.cached_property
    def stress(self) -> Scene:
        """Few blocks, so that requests are preempted; no drafts while many run."""
        return self.run(
            _twice(self.toy.asks),
            policy={"disable_by_batch_size": 5},
            drive=_waves,
            num_gpu_blocks_override=40,
            max_num_batched_tokens=48,
        )

    @functools.cached_property
    def preempted(self) -> Scene:
        """The ordinary run with few blocks."""
        return self.run(
            _twice(self.toy.asks), drive=_waves, num_gpu_blocks_override=40, max_num_batched_tokens=48
        )

    @functools.cached_property
    def failing(self) -> Scene:
        """The ordinary run, with every fourth call of the proposer failing, before or after it worked."""
        from .probe import Interference

        interference = Interference(
            fails_before=lambda call: call % 8 == FIRST_FAILURE, fails_after=lambda call: call % 8 == 7
        )
        return self.run(_twice(self.toy.asks), interference, drive=_waves, max_num_batched_tokens=48)

    def built(self) -> Proposer:
        """The proposer without a probe, loaded and bound to an engine that nobody uses."""
        with self.rig() as rig:
            assert rig.probe is not None
            return rig.probe.inner


def _twice(asks: Sequence[Ask]) -> list[Ask]:
    return [*asks, *(ask.named(f"{ask.key}-again") for ask in asks)]


def _waves(rig: Rig, asks: Sequence[Ask]) -> dict[str, list[int]]:
    half = len(asks) // 2
    return rig.generate(asks[:half]) | rig.generate(asks[half:])
