"""Fixtures of the tests across distributions: a tiny target, every drafter, and what must hold after a run.

``SPECDECODE_CHECK_WRITES`` makes the engine assert that no write reaches a block that is published or
held twice.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import attrs
import numpy as np
import pytest

os.environ.setdefault("SPECDECODE_CHECK_WRITES", "1")

MAX_MODEL_LEN = 128
BLOCK_SIZE = 4
EOS = 2

#: The ranks that lead to each node of a fixed tree of 4 levels.
TREE = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 0, 0]]

#: Drafters whose drafts are no function of the history, or that are none.
NOT_STATELESS = ("none", "ragged")


@attrs.frozen(eq=False)
class Ask:
    """A request."""

    prompt: list[int]
    params: Any


@functools.cache
def prompt(index: int) -> tuple[int, ...]:
    """Random ids; the lengths are 5, 12, 19, ..."""
    ids = np.random.default_rng(index).integers(3, 300, 5 + 7 * index)
    return tuple(ids.tolist())


class Lab:
    """A tiny target, and engines around it whose every output and draft is compared with a reference."""

    def __init__(self, target: Path, draft: Path) -> None:
        import torch
        from specdecode.models import load_model, resolve_model
        from specdecode.testing import scripted

        torch.set_num_threads(1)
        scripted.install()
        self.target = target
        self.draft = draft
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = load_model(
            resolve_model(str(target)),
            dtype=torch.float32,
            device=self.device,
            max_model_len=MAX_MODEL_LEN,
        )
        self._expected: dict[Any, list[int]] = {}
        self._drafts: dict[Any, Any] = {}
        self._serial = itertools.count()

    # -- requests -------------------------------------------------------------------------------
    def ask(self, prompt_ids: Iterable[int], **params: Any) -> Ask:
        from specdecode import SamplingParams

        return Ask(list(prompt_ids), SamplingParams(**params))

    def prompt(self, index: int) -> list[int]:
        return list(prompt(index))

    def mixed(self, count: int = 8, **changes: Any) -> list[Ask]:
        """``count`` requests of mixed lengths: greedy and seeded, with penalties and without, in turn."""
        from specdecode import SamplingParams

        kinds: list[dict[str, Any]] = [
            {"temperature": 0},
            {"temperature": 0.9, "top_p": 0.9, "seed": 5},
            {"temperature": 0.9, "seed": 6, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
            {"temperature": 0, "presence_penalty": 0.6, "frequency_penalty": 0.6},
            {"temperature": 0.7, "top_k": 5, "seed": 2**63},
            {"temperature": 0, "min_tokens": 9},
            {"temperature": 1.2, "min_p": 0.02, "seed": -7},
            {"temperature": 0.9, "top_p": 0.9, "seed": 5, "logit_bias": {17: 4.0, 21: -100.0}},
        ]
        return [
            Ask(
                list(prompt(index)),
                SamplingParams(**({"max_tokens": 8 + 3 * index} | kinds[index % 8] | changes)),
            )
            for index in range(count)
        ]

    def expected(self, ask: Ask, index: int = 0, max_model_len: int = MAX_MODEL_LEN) -> list[int]:
        """The output by :func:`reference_decode`."""
        from specdecode.testing.reference import reference_decode

        params = ask.params.clone(n=1, speculation=None)
        key = (tuple(ask.prompt), repr(params), index, max_model_len)
        if key not in self._expected:
            self._expected[key] = reference_decode(
                self.model,
                ask.prompt,
                params,
                seed=seed_of(params),
                index=index,
                eos_ids=(EOS,),
                max_model_len=max_model_len,
            )
        return self._expected[key]

    def texts(self, asks: Iterable[Ask]) -> list[list[int]]:
        """Prompt and output of every completion, the outputs going on behind a stop."""
        texts = []
        for ask in asks:
            unstopped = Ask(ask.prompt, ask.params.clone(stop_token_ids=(), ignore_eos=True))
            texts += [ask.prompt + self.expected(unstopped, index) for index in range(ask.params.n)]
        return texts

    # -- drafters -------------------------------------------------------------------------------
    def config(self, method: str, texts: Sequence[Sequence[int]] = ()) -> dict[str, Any] | None:
        """The ``speculative_config`` of a drafter that knows ``texts``."""
        of = functools.partial(dict, num_speculative_tokens=4)
        half = texts[: max(1, len(texts) // 2)]
        eagle = of(method="scripted-eagle")
        configs: dict[str, dict[str, Any] | None] = {
            "none": None,
            "oracle": of(method="scripted-oracle", texts=texts, wrong_at=[3]),
            "liar": of(method="scripted-liar", texts=texts),
            "ragged": of(method="scripted-ragged", texts=texts),
            "oracle-tree": {"method": "scripted-oracle-tree", "texts": texts, "num_speculative_tokens": 7},
            "ngram": of(method="ngram", prompt_lookup_min=1, prompt_lookup_max=3),
            "self-draft": of(method="scripted-self-draft"),
            "small-draft": of(method="scripted-small-draft", model=str(self.draft)),
            "draft-model": of(method="draft_model", model=str(self.draft)),
            "eagle": eagle,
            "eagle-fixed-tree": {
                "method": "scripted-eagle",
                "num_speculative_tokens": len(TREE),
                "tree": TREE,
            },
            "eagle-grown-tree": {
                "method": "scripted-eagle",
                "num_speculative_tokens": 9,
                "fanout": 3,
                "depth": 4,
            },
            "eagle3": eagle | {"three_taps": True},
            "eagle3-grown-tree": {
                "method": "scripted-eagle",
                "num_speculative_tokens": 8,
                "fanout": 4,
                "depth": 3,
                "three_taps": True,
            },
            "medusa": {"method": "scripted-medusa"},
            "cascade": {
                "method": "scripted-cascade",
                "children": [of(method="scripted-oracle", texts=half), eagle],
            },
            "cascade-on-device": {
                "method": "scripted-cascade",
                "children": [eagle | {"three_taps": True}, of(method="scripted-self-draft", layers=1)],
            },
        }
        return configs[method]

    def rig(
        self,
        inner: str | Mapping[str, Any] | None,
        asks: Sequence[Ask] = (),
        order: str = "plain",
        *,
        policy: Mapping[str, Any] | None = None,
        recorded: bool = True,
        failures: bool = False,
        **engine: Any,
    ) -> Rig:
        """An engine with a recorded drafter.

        Args:
            inner: name of a drafter, or its ``speculative_config``.
            asks: what it will be asked, for the drafters that know the answers.
            policy: core's own keys of ``speculative_config``.
            failures: whether the proposer is expected to fail.
            engine: arguments of ``LLM``.
        """
        from specdecode import LLM
        from specdecode.testing.recording import recording

        config = self.config(inner, self.texts(asks)) if isinstance(inner, str) else inner
        name = f"recording-{next(self._serial)}"
        outer = None
        if config is not None:
            recorder = {"method": "scripted-recorder", "inner": config, "recording": name}
            outer = {**(recorder if recorded else config), **(policy or {})}
        defaults: dict[str, Any] = {
            "dtype": "float32",
            "device": self.device.type,
            "block_size": BLOCK_SIZE,
            "num_gpu_blocks_override": 300,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "max_model_len": MAX_MODEL_LEN,
            "skip_tokenizer_init": True,
        }
        llm = LLM(
            str(self.target),
            speculative_config=outer,
            async_scheduling=order == "late",
            **(defaults | engine),
        )
        seen = recording(name) if config is not None and recorded else None
        return Rig(self, llm, config, seen, failures, stateless=inner not in NOT_STATELESS)

    def seatable(self, count: int = 8, **changes: Any) -> list[Ask]:
        """Of :meth:`mixed` those that ask for nothing the host would have to look at."""
        return [
            ask for index, ask in enumerate(self.mixed(2 * count, **changes)) if index % 8 in (0, 1, 4, 6)
        ]

    def wrong_drafts(self, rig: Rig) -> list[str]:
        """Drafts that a stateless reference would not have made."""
        from specdecode.testing.recording import DraftRecord, wrong_drafts
        from specdecode.testing.reference import DenseStep, StatelessDrafter

        assert rig.recording is not None
        config = without_flakes(rig.config)
        drafter = StatelessDrafter(self.model, rig.llm.llm_engine.target, config)

        def stateless(record: DraftRecord) -> Any:
            index = int(record.request_id.rsplit("/", 1)[1].split("#")[0])  # "<request>/<index>#<serial>"
            key = (repr(config), record.history, repr(record.params), record.budget, record.room, index)
            if key not in self._drafts:
                self._drafts[key] = drafter.drafts(
                    DenseStep(
                        history=record.history,
                        prompt_len=record.prompt_len,
                        params=record.params,
                        budget=record.budget,
                        room=record.room,
                        seed=seed_of(record.params),
                        index=index,
                        eos=() if record.params.ignore_eos else (EOS,),
                    )
                )
            return self._drafts[key]

        return wrong_drafts(rig.recording.drafts, stateless)


@pytest.fixture(scope="module")
def captured_steps():
    """Graphs where there is a GPU: checking each step's writes looks at tensors that a graph keeps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SPECDECODE_CHECK_WRITES", raising=False)
        yield


@attrs.define(eq=False)
class Rig:
    """One engine under test. As a context manager it checks at the end that nothing is left behind."""

    lab: Lab
    llm: Any
    config: Mapping[str, Any] | None
    recording: Any
    failures: bool
    stateless: bool  #: whether every draft is compared with the reference at the end

    @property
    def core(self) -> Any:
        return self.llm.llm_engine.core

    def metric(self, name: str) -> Any:
        """A metric's value; 0 if there is none."""
        return {metric.name: metric.value for metric in self.llm.get_metrics()}.get(name, 0)

    def generate(self, asks: Sequence[Ask]) -> list[Any]:
        """Run ``asks`` as one call of ``LLM.generate`` and compare every output with the reference."""
        prompts = [{"prompt_token_ids": ask.prompt} for ask in asks]
        outputs = self.llm.generate(prompts, [ask.params for ask in asks], use_tqdm=False)
        for ask, output in zip(asks, outputs, strict=True):
            self.compare(ask, output)
        return outputs

    def compare(self, ask: Ask, output: Any) -> None:
        """A finished request's ids are the reference's."""
        limit = self.llm.llm_engine.target.max_model_len
        assert [completion.index for completion in output.outputs] == list(range(ask.params.n))
        for completion in output.outputs:
            want = self.lab.expected(ask, completion.index, limit)
            assert list(completion.token_ids) == want, f"request {output.request_id}/{completion.index}"
            stops = {EOS, *ask.params.stop_token_ids}
            reason = "stop" if want[-1] in stops and len(want) >= ask.params.min_tokens else "length"
            assert completion.finish_reason == reason
            assert len(completion.token_sources) == len(want)

    def add(self, request_id: str, ask: Ask) -> None:
        self.llm.llm_engine.add_request(request_id, {"prompt_token_ids": ask.prompt}, ask.params)

    def step(self, count: int = 1) -> dict[str, Any]:
        """Run steps; the requests that finished."""
        finished = {}
        for _ in range(count):
            for output in self.llm.llm_engine.step():
                if output.finished:
                    finished[output.request_id] = output
        return finished

    def drain(self, limit: int = 2000) -> dict[str, Any]:
        """Step until nothing is left."""
        finished: dict[str, Any] = {}
        for _ in range(limit):
            if not self.llm.llm_engine.has_unfinished_requests():
                return finished
            finished |= self.step()
        raise AssertionError(f"not done after {limit} steps")

    def abort(self, *request_ids: str) -> None:
        self.llm.llm_engine.abort_request(request_ids)

    def generate_but(self, asks: Sequence[Ask], gone: Sequence[str], steps: int) -> None:
        """Run ``asks``, give those up that have not finished after ``steps`` of the requests ``gone``, and
        compare the others with the reference."""
        for index, ask in enumerate(asks):
            self.add(str(index), ask)
        finished = self.step(steps)
        gone = [name for name in gone if name not in finished]
        self.abort(*gone)
        finished |= self.drain()
        for index, ask in enumerate(asks):
            if str(index) not in gone:
                self.compare(ask, finished[str(index)])

    def fail_every(self, number: int) -> None:
        """Have every so manieth call of the proposer raise."""
        inner, calls = self.core.drafting.proposer.proposer, itertools.count(1)
        propose = inner.propose

        def flaky(step: Any, out: Any) -> None:
            if next(calls) % number == number - 1:
                raise RuntimeError("on purpose")
            propose(step, out)

        inner.propose = flaky

    # -- what must hold when all requests have ended --------------------------------------------
    def check(self) -> None:
        """Books balance, the drafter's life was legal, its state is gone, every draft is the reference's."""
        core = self.core
        self.drain()  # in the late order, what was computed for requests that had ended
        assert not core.outputs and not core.scheduler.running and not core.scheduler.waiting
        core.scheduler.check()
        core.scheduler.pool.check([])
        assert core.scheduler.pool.num_free == core.scheduler.pool.num_blocks
        assert self.failures or self.metric("specdecode:proposer_failures") == 0
        if self.recording is not None:
            from specdecode.testing.recording import check_lifecycle
            from specdecode.testing.scripted.faulty import BrokenOnPurpose

            assert not [error for error in self.recording.failures if not isinstance(error, BrokenOnPurpose)]
            check_lifecycle(self.recording.events)
            assert not self.recording.alive
            assert not self.recording.faults, self.recording.faults[:3]
            assert self.failures or not self.metric("specdecode:drafts_dropped_by_fault")
            if self.stateless:
                wrong = self.lab.wrong_drafts(self)
                assert not wrong, (
                    f"{len(wrong)} of {len(self.recording.drafts)} drafts are wrong: {wrong[:3]}"
                )

    def __enter__(self) -> Rig:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.check()
        finally:
            self.llm.shutdown()


def seed_of(params: Any) -> int:
    """What keys a seeded request's noise."""
    from specdecode.sampling import UnseededStream, resolve_seed

    assert params.greedy or params.seed is not None
    return resolve_seed(params.seed, UnseededStream(0)) if params.seed is not None else 0


def without_flakes(config: Any) -> Any:
    """The drafter inside a flaky one."""
    return config["inner"] if config["method"] == "scripted-flaky" else config


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    from specdecode.testing.tiny import tiny_checkpoint

    root = tmp_path_factory.mktemp("checkpoints")
    # Outputs so small that the next token follows from the last one now and then, as untrained heads guess.
    target = tiny_checkpoint(root / "target", output_scale=0.5, max_position_embeddings=256)
    draft = tiny_checkpoint(
        root / "draft", output_scale=0.5, max_position_embeddings=256, num_hidden_layers=1
    )
    yield Lab(target, draft)
