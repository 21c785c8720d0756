"""The matrix: cases x proposers x circumstances, every cell compared with the reference decoder."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from ..api.outputs import RequestOutput
from ..api.params import SamplingParams
from .cases import Case
from .comparison import differences, joined

if TYPE_CHECKING:
    from .reference import ReferenceDecoder

MAX_MODEL_LEN = 64

#: Arguments that all engines have unless theirs say otherwise.
DEFAULTS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": MAX_MODEL_LEN,
    "max_num_batched_tokens": 96,
    "max_num_seqs": 8,
}
#: Engines: arguments of ``LLM`` beside those that all have.
ROOMY: dict[str, Any] = {"num_gpu_blocks_override": 2000}
CHUNKS: dict[str, Any] = {"max_num_batched_tokens": 16}
CRAMPED: dict[str, Any] = {"num_gpu_blocks_override": 24}
LATE: dict[str, Any] = {"async_scheduling": True}

#: Run in each batch beside the cases; nobody can tell what comes of them.
NEIGHBOURS = (
    SamplingParams(temperature=1.0, max_tokens=20),
    SamplingParams(temperature=1.2, n=2, max_tokens=9, logprobs=1),
    SamplingParams(temperature=0.8, frequency_penalty=1.0, max_tokens=14),
)


@attrs.define
class Witness:
    """What happened in a run, as far as a circumstance is about it."""

    requests: int = 0
    hits: int = 0  #: requests that found a prefix in the cache
    chunks: int = 0  #: rows that computed a part of a prompt and left another for later
    most_rows: int = 0  #: in one step
    mixed_steps: int = 0  #: steps that computed prompts and verified drafts
    overlapped: int = 0  #: steps over seats; 1 where the proposer keeps all requests from theirs
    branches: int = 0  #: rows of drafts that were no chain
    preemptions: int = 0
    drafted: int = 0
    accepted: int = 0
    failures: int = 0  #: calls in which the proposer raised

    def saw(self, plan: Any) -> None:
        """Take down a step's plan."""
        rows = plan.rows
        self.most_rows = max(self.most_rows, len(rows))
        self.chunks += sum(row.start + row.new < len(row.request.prompt_ids) for row in rows)
        self.mixed_steps += any(row.prefill for row in rows) and any(row.drafts for row in rows)
        self.branches += sum(row.drafts.parents != (*range(-1, len(row.drafts) - 1),) for row in rows)


@attrs.frozen(kw_only=True)
class Circumstance:
    """How the cases are run, and what must have happened for it to count."""

    name: str
    engine: Mapping[str, Any]
    alone: bool = False  #: one request at a time, with nothing cached
    warm: bool = False  #: after the same requests, so that all prompts are cached
    pairs: bool = False  #: the combinations of fields are run as well
    happened: Mapping[str, int]  #: least values of a witness

    def missing(self, witness: Witness) -> list[str]:
        """What did not happen."""
        return [
            f"{name} is {getattr(witness, name)}, must be at least {least}"
            for name, least in self.happened.items()
            if getattr(witness, name) < least
        ]


CIRCUMSTANCES = (
    Circumstance(name="alone", engine=ROOMY, alone=True, happened={"requests": 1}),
    Circumstance(name="batch", engine=ROOMY, pairs=True, happened={"most_rows": 8}),
    Circumstance(name="prefix-hits", engine=ROOMY, warm=True, happened={"hits": 20, "most_rows": 8}),
    Circumstance(name="chunked", engine=ROOMY | CHUNKS, happened={"chunks": 20, "most_rows": 5}),
    Circumstance(name="preempted", engine=CRAMPED, happened={"preemptions": 5}),
    # In a batch of all cases somebody always asks for what the host must look at.
    Circumstance(name="late", engine=ROOMY | LATE, alone=True, happened={"overlapped": 1}),
    Circumstance(
        name="late-chunked-preempted",
        engine=CRAMPED | CHUNKS | LATE,
        pairs=True,
        happened={"overlapped": 1, "chunks": 20, "preemptions": 5},
    ),
)


class Answers:
    """What the reference makes of cases; each is computed once."""

    def __init__(self, decoder: ReferenceDecoder) -> None:
        self._decoder = decoder
        self._known: dict[tuple[Any, ...], RequestOutput] = {}

    def of(self, case: Case) -> RequestOutput:
        """What must come of it."""
        return self._ask(case.prompt, case.params)

    def without(self, case: Case) -> RequestOutput:
        """What comes of it without what it shows."""
        return self._ask(case.prompt, case.without)

    def texts(self, cases: Sequence[Case]) -> list[list[int]]:
        """Prompt and output of every completion, going on behind their ends: what an oracle knows."""
        asked = [self._ask(case.prompt, case.unstopped) for case in cases]
        return [
            [*output.prompt_token_ids, *completion.token_ids]
            for output in asked
            for completion in output.outputs
        ]

    def _ask(self, prompt: tuple[int, ...], params: SamplingParams) -> RequestOutput:
        key = (prompt, *(repr(value) for value in attrs.astuple(params, recurse=False)))
        if key not in self._known:
            self._known[key] = self._decoder.request(prompt, params)
        return self._known[key]


class Subject:
    """An engine under test."""

    def __init__(self, target: str, config: Any, engine: Mapping[str, Any], **common: Any) -> None:
        from ..api.llm import LLM

        defaults: dict[str, Any] = {
            "dtype": "float32",
            "max_num_seqs": 8,
            "max_num_batched_tokens": 96,
        }
        defaults["max_model_len"] = MAX_MODEL_LEN
        self._llm = LLM(target, speculative_config=config, **(defaults | common | dict(engine)))
        self._engine = self._llm.llm_engine
        self._serial = itertools.count()
        self._witness = Witness()
        self._warm: set[str] = set()
        self._watch()

    def run(self, cases: Sequence[Case], circumstance: Circumstance) -> tuple[list[RequestOutput], Witness]:
        """The results of ``cases``, and what happened meanwhile."""
        if circumstance.warm and not self._warm.issuperset(case.name for case in cases):
            self._together(cases)
        self._witness = Witness(overlapped=int(self._never_seated))
        before = self._counters()
        if circumstance.alone:
            outputs = [output for case in cases for output in self._cold([case])]
        else:
            outputs = self._together(cases) if circumstance.warm else self._cold(cases, NEIGHBOURS)
        witness, after = self._witness, self._counters()
        witness.requests = len(outputs)
        witness.hits = sum(output.num_cached_tokens > 0 for output in outputs)
        for name, value in after.items():
            setattr(witness, name, int(value - before[name]))
        return outputs, witness

    def close(self) -> None:
        """Shut it down.

        Raises:
            AssertionError: something was left behind.
        """
        try:
            scheduler = self._engine.core.scheduler
            assert not self._engine.has_unfinished_requests()
            assert not scheduler.running and not scheduler.waiting
            scheduler.check()
            assert scheduler.pool.num_free == scheduler.pool.num_blocks, "blocks were not given back"
        finally:
            self._llm.shutdown()

    def _cold(self, cases: Sequence[Case], neighbours: Sequence[SamplingParams] = ()) -> list[RequestOutput]:
        assert self._engine.reset_prefix_cache()
        self._warm.clear()
        return self._together(cases, neighbours)

    def _together(
        self, cases: Sequence[Case], neighbours: Sequence[SamplingParams] = ()
    ) -> list[RequestOutput]:
        told = self.told(cases, neighbours)
        return [joined(outputs, case.params.output_kind) for case, outputs in zip(cases, told, strict=True)]

    def told(
        self, cases: Sequence[Case], neighbours: Sequence[SamplingParams] = ()
    ) -> list[list[RequestOutput]]:
        """All outputs of each of ``cases``, run at once; the neighbours come between them."""
        names: list[str] = []
        for place, case in enumerate(cases):
            for params in neighbours if place == len(cases) // 2 else ():
                self._engine.add_request(f"neighbour {next(self._serial)}", _prompt(cases[0]), params)
            name = f"{next(self._serial)} {case.name}"
            names.append(name)
            self._engine.add_request(name, _prompt(case), case.params)
        told: dict[str, list[RequestOutput]] = defaultdict(list)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                told[output.request_id].append(output)
        self._warm.update(case.name for case in cases)
        return [told[name] for name in names]

    @property
    def _never_seated(self) -> bool:
        core = self._engine.core
        return getattr(core, "why_never", None) is not None

    def _watch(self) -> None:
        """Have every plan of the scheduler taken down, and every step over seats."""
        core = self._engine.core
        scheduler, steady = core.scheduler, getattr(core, "steady", None)
        schedule = scheduler.schedule

        def watched(apart: Any = ()) -> Any:
            plan = schedule(apart)
            self._witness.saw(plan)
            return plan

        scheduler.schedule = watched  # type: ignore[method-assign]
        if steady is None:
            return
        launch = steady.run

        def launched(*args: Any) -> Any:
            self._witness.overlapped += 1
            return launch(*args)

        steady.run = launched

    def _counters(self) -> dict[str, float]:
        metrics = {metric.name: metric.value for metric in self._llm.get_metrics()}
        return {
            "preemptions": metrics["vllm:num_preemptions"],
            "drafted": metrics.get("vllm:spec_decode_num_draft_tokens", 0),
            "accepted": metrics.get("vllm:spec_decode_num_accepted_tokens", 0),
            "failures": metrics.get("specdecode:proposer_failures", 0),
        }


def _prompt(case: Case) -> dict[str, Any]:
    return {"prompt_token_ids": list(case.prompt)}


def faults(cases: Sequence[Case], outputs: Sequence[RequestOutput], answers: Answers) -> Iterator[str]:
    """Each difference of a cell from the reference, with the name of its case."""
    for case, output in zip(cases, outputs, strict=True):
        yield from (f"{case.name}: {fault}" for fault in differences(output, answers.of(case)))
