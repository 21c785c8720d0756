"""What the tests of ``faults.md`` share: TINY and TABLE targets, BASE, and engines with every drafter.

BASE is the same engine with the same parameters and no ``speculative_config``; an output *is* BASE's
if ids, text, finish and stop reason are equal and there are as many log-probabilities. TINY is the
``lab``'s target, a TABLE one whose next token depends on the last one alone, by a law the test chose.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from specdecode.contract import (
    API,
    BuildContext,
    Drafts,
    LengthFields,
    Needs,
    PlanContext,
    Proposer,
    ProposerSpec,
    StepView,
    Tokens,
    option,
)
from specdecode.plugins import default_manager, hookimpl

MAX_MODEL_LEN = 160

#: Drafters of any ``num_speculative_tokens``.
SIZED = (
    "ngram",
    "oracle",
    "spoiled",
    "liar",
    "ragged",
    "oracle-tree",
    "self-draft",
    "small-draft",
    "eagle",
    "eagle-grown-tree",
    "eagle3",
    "cascade",
)
#: Drafters whose shape is fixed.
SHAPED = ("eagle-fixed-tree", "eagle3-grown-tree", "medusa", "cascade-on-device")
DRAFTERS = (*SIZED, *SHAPED)


# -- two drafters of our own, through the public plugin API -----------------------------------------
@attrs.frozen(kw_only=True)
class PuppetConfig(LengthFields):
    token: int = option("the draft wherever nothing better is known")
    texts: tuple[tuple[int, ...], ...] = option("whole sequences to follow", default=())
    at: tuple[int, ...] = option("offsets at which `token` replaces the text", default=())


@attrs.frozen(kw_only=True)
class GamblerConfig(LengthFields):
    law: tuple[tuple[float, ...], ...] = option("logits behind each token")
    temperature: float = option("of the drafts")


class PuppetProposer(Proposer):
    """Follows a text but for some offsets, where it says ``token``; ``token`` alone without a text."""

    def __init__(self, config: PuppetConfig) -> None:
        from specdecode.testing.scripted.oracle import Script

        self._config = config
        self._script = Script(config.texts)

    def propose(self, step: StepView, out: Drafts) -> None:
        config = self._config
        for row, count in enumerate(np.minimum(step.budget, step.room).tolist()):
            ids = self._script.follow(step.history[row], count)
            ids += [config.token] * (count - len(ids))
            out.ids[row, :count] = [
                config.token if at in config.at else token for at, token in enumerate(ids)
            ]
            out.lens[row] = count


class GamblerProposer(Proposer):
    """Draws its drafts from a table at a temperature of its own, with dice of its own."""

    def __init__(self, config: GamblerConfig) -> None:
        logits = np.array(config.law) / config.temperature
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        self._cumulative = (weights / weights.sum(-1, keepdims=True)).cumsum(-1)

    def propose(self, step: StepView, out: Drafts) -> None:
        for row, count in enumerate(np.minimum(step.budget, step.room).tolist()):
            history = list(step.history[row])
            token = history[-1]
            for offset, die in enumerate(np.random.default_rng([7, *history]).random(count)):
                token = int((self._cumulative[token] < die).sum().clip(max=len(self._cumulative) - 1))
                out.ids[row, offset] = token
            out.lens[row] = count


class FaultsPlugin:
    """``faults-puppet`` and ``faults-gambler``."""

    @hookimpl
    def specdecode_proposers(self) -> Iterator[ProposerSpec]:
        def needs(config: LengthFields, ctx: PlanContext) -> Needs:
            count = config.num_speculative_tokens
            return Needs(width=count, depth=count, tokens=Tokens.HISTORY)

        def puppet(config: PuppetConfig, ctx: BuildContext) -> Proposer:
            return PuppetProposer(config)

        def gambler(config: GamblerConfig, ctx: BuildContext) -> Proposer:
            return GamblerProposer(config)

        for name, config, build in (("puppet", PuppetConfig, puppet), ("gambler", GamblerConfig, gambler)):
            yield ProposerSpec(
                name=f"faults-{name}", summary=name, api=API, config=config, needs=needs, build=build
            )


# -- engines ----------------------------------------------------------------------------------------
@pytest.fixture(params=DRAFTERS)
def drafter(request: pytest.FixtureRequest) -> str:
    """Every drafter there is, in turn; a test that wants some of them parametrizes ``drafter`` itself."""
    return request.param


@attrs.define(eq=False)
class Engine:
    """An ``LLM`` and what its drafter wrote down."""

    llm: Any
    recording: Any = None  #: None: there is no drafter

    @property
    def core(self) -> Any:
        return self.llm.llm_engine.core

    def metric(self, name: str) -> Any:
        """A metric's value; 0 if there is none."""
        return {metric.name: metric.value for metric in self.llm.get_metrics()}.get(name, 0)

    @property
    def drafts(self) -> int:
        return self.metric("vllm:spec_decode_num_drafts")

    @property
    def drafted(self) -> int:
        return self.metric("vllm:spec_decode_num_draft_tokens")

    @property
    def accepted(self) -> int:
        return self.metric("vllm:spec_decode_num_accepted_tokens")

    def generate(self, asks: Sequence[Any]) -> list[Any]:
        """The outputs of one call of ``LLM.generate``."""
        prompts = [{"prompt_token_ids": ask.prompt} for ask in asks]
        return self.llm.generate(prompts, [ask.params for ask in asks], use_tqdm=False)

    def assert_idle(self) -> None:
        """No request runs or waits, all blocks are free, the drafter holds no request."""
        core = self.core
        assert not core.outputs and not core.scheduler.running and not core.scheduler.waiting
        core.scheduler.check()
        core.scheduler.pool.check([])
        assert core.scheduler.pool.num_free == core.scheduler.pool.num_blocks
        if self.recording is not None:
            from specdecode.testing.recording import check_lifecycle

            check_lifecycle(self.recording.events)
            assert not self.recording.alive


def assert_same(got: Sequence[Any], want: Sequence[Any], what: str = "") -> None:
    """``got`` is BASE's output ``want``."""
    assert len(got) == len(want)
    for place, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        for one, other in zip(mine.outputs, theirs.outputs, strict=True):
            assert _visible(one) == _visible(other), f"{what} request {place} completion {other.index}"


def _visible(completion: Any) -> tuple[Any, ...]:
    logprobs = completion.logprobs
    return (
        list(completion.token_ids),
        completion.text,
        completion.finish_reason,
        completion.stop_reason,
        None if logprobs is None else len(logprobs),
    )


def _repeats(params: Any) -> bool:
    return params.greedy or params.seed not in (None, -1)


class FaultLab:
    """Engines over TINY and TABLE, with and without drafters."""

    def __init__(self, lab: Any, root: Path) -> None:
        self.lab = lab
        self._root = root
        self._serial = itertools.count()
        self._plain: dict[str, Engine] = {}
        self._base: dict[str, list[Any]] = {}
        self._engines: list[Engine] = []

    def table(self, law: Any) -> str:
        """A checkpoint whose logits behind token ``i`` are ``law[i]``."""
        from specdecode.testing.tiny import table_checkpoint

        return str(table_checkpoint(self._root / f"table-{next(self._serial)}", law))

    def ask(self, prompt: Sequence[int], **params: Any) -> Any:
        """A request; greedy unless ``temperature`` says otherwise."""
        return self.lab.ask(prompt, **({"temperature": 0.0} | params))

    def prompt(self, index: int) -> list[int]:
        """Random ids; the lengths are 5, 12, 19, ..."""
        return self.lab.prompt(index)

    def drafter(self, name: str, texts: Sequence[Sequence[int]], k: int = 4, **fields: Any) -> dict[str, Any]:
        """The ``speculative_config`` of one of ``DRAFTERS`` that knows ``texts``, of ``k`` where it can."""
        config = dict(self.lab.config("oracle" if name == "spoiled" else name, texts))
        if name == "oracle":
            config["wrong_at"] = []
        elif name == "spoiled":
            config["wrong_at"] = [k // 2]
        if name in SIZED and "num_speculative_tokens" in config:
            config["num_speculative_tokens"] = k
        return config | fields

    def engine(
        self,
        config: Mapping[str, Any] | None = None,
        *,
        model: str | None = None,
        recorded: bool = True,
        **options: Any,
    ) -> Engine:
        """An engine over TINY, or the checkpoint at a path, its drafter written down unless told not to."""
        from specdecode import LLM
        from specdecode.testing.recording import recording

        name = f"faults-{next(self._serial)}"
        written = config is not None and recorded
        outer: Mapping[str, Any] | None = config
        if written:
            outer = {"method": "scripted-recorder", "inner": config, "recording": name}
        defaults: dict[str, Any] = {
            "dtype": "float32",
            "device": self.lab.device.type,
            "block_size": 4,
            "num_gpu_blocks_override": 1200,
            "max_num_seqs": 64,
            "max_num_batched_tokens": 1024,
            "max_model_len": MAX_MODEL_LEN,
        }
        llm = LLM(model or str(self.lab.target), speculative_config=outer, **(defaults | options))
        engine = Engine(llm, recording(name) if written else None)
        self._engines.append(engine)
        return engine

    def plain(self, *, model: str | None = None, **options: Any) -> Engine:
        """BASE's engine; kept, since it has no state that could show."""
        key = repr((model, sorted(options.items())))
        if key not in self._plain:
            self._plain[key] = self.engine(model=model, **options)
            self._engines.remove(self._plain[key])
        return self._plain[key]

    def base(self, asks: Sequence[Any], **options: Any) -> list[Any]:
        """BASE's outputs; made once for each list of requests whose outputs repeat."""
        if any(ask.params.logits_processors or not _repeats(ask.params) for ask in asks):
            return self.plain(**options).generate(asks)
        key = repr((sorted(options.items()), [(ask.prompt, ask.params) for ask in asks]))
        if key not in self._base:
            self._base[key] = self.plain(**options).generate(asks)
        return self._base[key]

    def texts(self, asks: Sequence[Any], **options: Any) -> list[list[int]]:
        """What an oracle is told: prompt and BASE's output of each request, had it no stops or minimum."""
        endless = [
            attrs.evolve(
                ask, params=ask.params.clone(stop=(), stop_token_ids=(), ignore_eos=True, min_tokens=0)
            )
            for ask in asks
        ]
        outputs = self.base(endless, **options)
        return [
            ask.prompt + list(completion.token_ids)
            for ask, output in zip(asks, outputs, strict=True)
            for completion in output.outputs
        ]

    def close(self) -> None:
        """Shut the engines of one test down."""
        while self._engines:
            self._engines.pop().llm.shutdown()


@pytest.fixture(scope="session")
def fault_lab(lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultLab]:
    default_manager().register(FaultsPlugin(), name="faults")
    shared = FaultLab(lab, tmp_path_factory.mktemp("faults"))
    try:
        yield shared
    finally:
        for engine in shared._plain.values():
            engine.llm.shutdown()
        default_manager().unregister("faults")


@pytest.fixture
def faults(fault_lab: FaultLab) -> Iterator[FaultLab]:
    """The lab; every engine that the test built is idle at its end, and shut down."""
    yield fault_lab
    try:
        for engine in fault_lab._engines:
            engine.assert_idle()
    finally:
        fault_lab.close()


@pytest.fixture(scope="session")
def same() -> Any:
    """:func:`assert_same`, for test files, which cannot import this one."""
    return assert_same
