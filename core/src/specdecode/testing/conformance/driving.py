"""Engines of the kit: real ones, over the toy target, with a probe where the proposer was built."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import attrs

from ...api.args import EngineArgs
from ...api.engine import LLMEngine
from ...api.outputs import CompletionOutput
from ...contract import BuildContext, Proposer
from ...plugins import PluginManager, Provided
from ..ranks import Threads, ranks_in_threads
from .asks import MAX_MODEL_LEN, Ask
from .comparing import name_of
from .probe import Interference, Log, Probe

#: What a proposer is put inside of, where it is built.
Wrap = Callable[[Proposer, BuildContext], Proposer]
#: Steps after which a run counts as one that never ends.
_MOST_STEPS = 2000


class Target(Protocol):
    """A checkpoint, and the device it is to work on."""

    path: Path
    device: str


class ProbingManager:
    """A plugin manager whose first resolved method is built inside a probe; for the rest it is ``manager``.

    The probe stands where the proposer would, so that core acts on the method's own needs. Faults of
    the plugin are never raised: the kit is to see what they cost.
    """

    strict = False

    def __init__(self, manager: PluginManager, wrap: Wrap) -> None:
        self._manager = manager
        self._wrap: Wrap | None = wrap

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def resolve(self, method: str, *, field: str = "method") -> Provided:
        provided = self._manager.resolve(method, field=field)
        wrap, self._wrap = self._wrap, None  # children are left alone
        if wrap is None:
            return provided
        build = provided.spec.build

        def probed(config: Any, context: BuildContext) -> Proposer:
            return wrap(build(config, context), context)

        return attrs.evolve(provided, spec=attrs.evolve(provided.spec, build=probed))


class Rig:
    """One engine of the kit."""

    def __init__(
        self, engine: LLMEngine, log: Log, probe: Probe | None, ranks: Threads | None = None
    ) -> None:
        self.engine = engine
        self.ranks = ranks  #: the other ranks, if there are any
        self.log = log
        self.probe = probe

    @classmethod
    def plain(cls, target: Target) -> Rig:
        """Without speculation."""
        return cls(LLMEngine(_args(target, {}, None)), Log(), None)

    @classmethod
    def probed(
        cls,
        target: Target,
        speculative_config: Mapping[str, Any],
        manager: PluginManager,
        interference: Interference,
        **engine: Any,
    ) -> Rig:
        """With the proposer that ``speculative_config`` names, inside a probe.

        Args:
            engine: arguments of the engine that differ from the kit's.
        """
        log = Log()
        built: list[Probe] = []

        def wrap(proposer: Proposer, context: BuildContext) -> Proposer:
            built.append(Probe(proposer, context.needs, log, interference))
            return built[-1]

        def elsewhere(proposer: Proposer, context: BuildContext) -> Proposer:
            return Probe(proposer, context.needs, Log(), interference)

        made, ranks = _engine(target, engine, speculative_config, manager, wrap, elsewhere)
        return cls(made, log, built[0], ranks)

    @classmethod
    def bare(
        cls,
        target: Target,
        speculative_config: Mapping[str, Any],
        manager: PluginManager,
        wrap: Callable[[Proposer], Proposer] | None = None,
        **engine: Any,
    ) -> Rig:
        """With the proposer as a user has it, or inside what ``wrap`` makes of it."""

        def build(proposer: Proposer, context: BuildContext) -> Proposer:
            return proposer if wrap is None else wrap(proposer)

        made, ranks = _engine(target, engine, speculative_config, manager, build, build)
        return cls(made, Log(), None, ranks)

    # -- requests -------------------------------------------------------------------------------
    def add(self, ask: Ask) -> None:
        prompt: dict[str, Any] = {"prompt_token_ids": list(ask.prompt)}
        if ask.namespace:
            prompt["cache_salt"] = ask.namespace
        self.engine.add_request(ask.key, prompt, ask.params)

    def step(self) -> dict[str, CompletionOutput]:
        """One step; key -> output of the requests that finished in it."""
        with quiet():
            outputs = self.engine.step()
        return {output.request_id: output.outputs[0] for output in outputs if output.finished}

    def drain(self) -> dict[str, list[int]]:
        """Step until no request is left; key -> output ids."""
        return {key: list(output.token_ids) for key, output in self._drain().items()}

    def outputs(self, wanted: Sequence[Ask]) -> dict[str, CompletionOutput]:
        """All of ``wanted`` at once; key -> output."""
        for ask in wanted:
            self.add(ask)
        return self._drain()

    def generate(self, wanted: Sequence[Ask]) -> dict[str, list[int]]:
        """All of ``wanted`` at once; key -> output ids."""
        return {key: list(output.token_ids) for key, output in self.outputs(wanted).items()}

    def _drain(self) -> dict[str, CompletionOutput]:
        finished: dict[str, CompletionOutput] = {}
        for _ in range(_MOST_STEPS):
            if not self.engine.has_unfinished_requests():
                return finished
            finished |= self.step()
        raise RuntimeError(f"requests are not done after {_MOST_STEPS} steps")

    def names(self, *, waiting: bool) -> list[str]:
        """Keys of the requests that wait, the preempted ones first, or of those that run."""
        scheduler = self.engine.core.scheduler
        return [name_of(request.id) for request in (scheduler.waiting if waiting else scheduler.running)]

    # -- what a server does to requests ---------------------------------------------------------
    def abort(self, *keys: str) -> None:
        with quiet():
            self.engine.abort_request(keys)

    def preempt(self, index: int) -> str | None:
        """Take the KV of a running request, if one runs; its key."""
        scheduler = self.engine.core.scheduler
        if not scheduler.running:
            return None
        place = index % len(scheduler.running)
        name = name_of(scheduler.running[place].id)

        def preempt(engine: LLMEngine) -> None:
            engine.core.scheduler.preempt(engine.core.scheduler.running[place])

        with quiet():
            self._everywhere(preempt)
        return name

    def update_weights(self, weights: Mapping[str, Any]) -> None:
        """Replace the target's weights; requests that run go on with the new ones."""
        with quiet(), tempfile.TemporaryDirectory() as folder:
            source: Any = weights
            if self.ranks is not None:  # each rank reads its share
                from safetensors.torch import save_file

                save_file(dict(weights), Path(folder) / "model.safetensors", {"format": "pt"})
                shutil.copy(Path(self.engine.target.path) / "config.json", folder)
                source = folder
            self.engine.update_weights(source, mode="keep")
            if self.ranks is not None:
                self.ranks.everywhere(lambda engine: None, self.engine)  # until all have read

    def rotate(self, by: int) -> None:
        """Change the order of the rows."""

        def turn(engine: LLMEngine) -> None:
            running = engine.core.scheduler.running
            if running:
                running[:] = running[by % len(running) :] + running[: by % len(running)]

        self._everywhere(turn)

    def _everywhere(self, function: Callable[[LLMEngine], None]) -> None:
        """What no user does, on every rank."""
        if self.ranks is None:
            function(self.engine)
        else:
            self.ranks.everywhere(function, self.engine)

    def forget(self) -> None:
        """Drop what the probe has written down so far."""
        self.log.rows.clear()
        self.log.prompt_lens.clear()

    def close(self) -> None:
        with quiet():
            self.engine.shutdown()

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _engine(
    target: Target,
    engine: Mapping[str, Any],
    speculative_config: Mapping[str, Any],
    manager: PluginManager,
    wrap: Wrap,
    elsewhere: Wrap,
) -> tuple[LLMEngine, Threads | None]:
    """An engine whose proposer is inside what ``wrap`` makes of it, and on other ranks ``elsewhere``."""

    def probing(own: Wrap) -> Any:  # delegates all but two attributes
        return ProbingManager(manager, own)

    args = _args(target, engine, speculative_config)
    if args.tensor_parallel_size == 1:
        return LLMEngine(args, probing(wrap)), None
    with ranks_in_threads(lambda: probing(elsewhere)) as started:
        return LLMEngine(args, probing(wrap)), started[0]


def _args(
    target: Target, changes: Mapping[str, Any], speculative_config: Mapping[str, Any] | None
) -> EngineArgs:
    keywords: dict[str, Any] = {
        "model": str(target.path),
        "device": target.device,
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "max_model_len": MAX_MODEL_LEN,
        "block_size": 4,
        "num_gpu_blocks_override": 400,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "speculative_config": speculative_config,
        # A probe wants to see each call, and what it is given on the host.
        "enforce_eager": True,
        "async_scheduling": False,
    }
    return EngineArgs(**(keywords | dict(changes)))


@contextmanager
def quiet() -> Iterator[None]:
    """Leave out the log's tracebacks of a failing proposer: the report tells of them."""
    logger = logging.getLogger("specdecode.engine.guard")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
