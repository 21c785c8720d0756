"""The proposers of the matrix, its engines, and the line that reports how many cells were compared."""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest

COUNTS = pytest.StashKey[collections.Counter[str]]()
#: How many drafts a step where a method leaves it open.
LENGTH = 5
BLOCK_SIZE = 4
#: How often in a run, at least, something is drafted, accepted or branches that must be.
MUST_HAPPEN = 30


@attrs.frozen
class Entry:
    """A proposer's configuration, and what must come of it."""

    config: Mapping[str, Any] | None
    accepts: bool = False  #: some of its drafts are accepted
    branches: bool = False  #: some of them are no chain
    fails: bool = False  #: it raises now and then


def proposers(draft: str, texts: Sequence[Sequence[int]], length: int = LENGTH) -> dict[str, Entry]:
    """Every method that is installed, in chain and tree; ``texts`` is what the oracles know."""
    of = functools.partial(dict, num_speculative_tokens=length)
    ngram = of(method="ngram", prompt_lookup_min=1, prompt_lookup_max=3)
    oracle = of(method="scripted-oracle", texts=texts)
    tree = {"method": "scripted-oracle-tree", "texts": texts, "num_speculative_tokens": length + 3}
    eagle = of(method="scripted-eagle")
    three = eagle | {"three_taps": True}
    paths = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 0, 0]]
    fixed = {"tree": paths, "num_speculative_tokens": len(paths)}
    grown = {"fanout": 3, "depth": 3, "num_speculative_tokens": length + 3}
    copy = of(method="scripted-self-draft")
    host = [oracle | {"texts": texts[::2]}, eagle]
    device = [copy | {"layers": 1}, three]
    broken = of(method="scripted-faulty", texts=texts, fault="id-too-high", every=3)
    return {
        "plain": Entry(None),
        "ngram": Entry(ngram, accepts=True),
        "oracle": Entry(oracle | {"wrong_at": [3]}, accepts=True),
        "liar": Entry(of(method="scripted-liar", texts=texts)),
        "ragged": Entry(of(method="scripted-ragged", texts=texts), accepts=True),
        "oracle-tree": Entry(tree, accepts=True, branches=True),
        "self-draft": Entry(copy, accepts=True),
        "small-draft": Entry(of(method="scripted-small-draft", model=draft)),
        "eagle": Entry(eagle),
        "eagle-fixed-tree": Entry(eagle | fixed, branches=True),
        "eagle-grown-tree": Entry(eagle | grown, branches=True),
        "eagle3": Entry(three),
        "eagle3-grown-tree": Entry(three | grown, branches=True),
        "medusa": Entry({"method": "scripted-medusa"}, branches=True),
        "cascade": Entry({"method": "scripted-cascade", "children": host}, accepts=True),
        "cascade-on-device": Entry({"method": "scripted-cascade", "children": device}),
        "recorder": Entry(
            {"method": "scripted-recorder", "inner": ngram, "recording": "matrix"}, accepts=True
        ),
        "flaky": Entry({"method": "scripted-flaky", "inner": copy, "every": 5}, accepts=True, fails=True),
        "faulty": Entry(broken, accepts=True),
    }


PROPOSERS = tuple(proposers("", ()))


class Matrix:
    """Cases, their answers, and engines: those of one proposer at a time."""

    def __init__(self, lab: Any, tokenizer: Path, counts: collections.Counter[str]) -> None:
        from specdecode.testing import matrix, word_tokenizer
        from specdecode.testing.cases import EOS, field_cases, pair_cases
        from specdecode.testing.reference import ReferenceDecoder

        words = word_tokenizer.word_tokenizer()
        words.save_pretrained(tokenizer)
        self.decoder = ReferenceDecoder(lab.model, words, eos_ids=[EOS], max_model_len=matrix.MAX_MODEL_LEN)
        self.circumstances = matrix.CIRCUMSTANCES
        self.answers = matrix.Answers(self.decoder)
        self.prompts = [lab.prompt(index) for index in (2, 3, 4)]
        self.fields = field_cases(self.prompts, self.plain_ids)
        self.pairs = list(pair_cases(self.prompts, self.plain_ids))
        self.cases = [*self.fields, *self.pairs]
        self._lab = lab
        self._tokenizer = str(tokenizer)
        self._counts = counts
        self._open: dict[Any, Any] = {}
        self._owner: Any = None

    def plain_ids(self, prompt: Sequence[int], params: Any) -> Sequence[int]:
        """The output of plain decoding."""
        return self.decoder.request(prompt, params).outputs[0].token_ids

    @functools.cache  # noqa: B019 - there is one matrix a session
    def pair_cases(self, seed: int) -> list[Any]:
        """Another covering of all pairs of values, with other noise."""
        from specdecode.testing.cases import pair_cases

        return [case.with_seed(seed) for case in pair_cases(self.prompts, self.plain_ids, seed)]

    @functools.cache  # noqa: B019
    def seeded_cases(self, seed: int) -> list[Any]:
        """The sampled ones of the cases of single fields, with other noise."""
        return [
            case.with_seed(seed) for case in self.fields if "seed" in case.base and "seed" not in case.changes
        ]

    def greedy(self, **changes: Any) -> Any:
        """A greedy case of a field whose output repeats itself, so that all drafters find something."""
        from specdecode.testing.cases import GREEDY, Case

        base = GREEDY | {"max_tokens": 20, "logit_bias": {11: 9.0}}
        return Case(repr(changes), tuple(self.prompts[0]), changes, base)

    def told(self, name: str, cases: Sequence[Any]) -> list[list[Any]]:
        """All outputs of each of ``cases``, together in a roomy engine."""
        from specdecode.testing.matrix import ROOMY

        subject = self._subject((name, id(cases)), self.entry(name, cases), ROOMY)
        return subject.told(cases)

    def entries(self) -> list[Entry]:
        """All proposers, knowing nothing."""
        return list(proposers(str(self._lab.draft), ()).values())

    def entry(self, name: str, cases: Sequence[Any], length: int = LENGTH) -> Entry:
        """A proposer that knows the answers to ``cases``."""
        return proposers(str(self._lab.draft), self.answers.texts(cases), length)[name]

    def cells(self, circumstance: Any) -> Sequence[Any]:
        """The cases of one circumstance."""
        return self.cases if circumstance.pairs else self.fields

    def compare(
        self,
        name: str,
        circumstance: Any,
        cases: Sequence[Any],
        *,
        known: Sequence[Any] = (),
        length: int = LENGTH,
        block_size: int = BLOCK_SIZE,
        strict: bool = True,
    ) -> list[str]:
        """What is wrong in the cells of ``cases`` with one proposer under one circumstance.

        Args:
            known: what the oracles know; by default ``cases``.
            length: drafts a step.
            block_size: of the engine, which has the same number of slots with any.
            strict: whether it is wrong if what makes the circumstance did not happen.
        """
        from specdecode.testing import matrix

        entry = self.entry(name, known or cases, length)
        blocks = circumstance.engine["num_gpu_blocks_override"] * BLOCK_SIZE // block_size
        engine = {**circumstance.engine, "num_gpu_blocks_override": blocks, "block_size": block_size}
        subject = self._subject((name, length, id(known or cases)), entry, engine)
        try:
            outputs, witness = subject.run(cases, circumstance)
        except BaseException:
            self.abandon()
            raise
        wrong = [*matrix.faults(cases, outputs, self.answers)]
        if witness.failures and not entry.fails:
            wrong.append(f"the proposer raised {witness.failures} times")
        if strict:
            wanted = {"drafted": entry.config, "accepted": entry.accepts, "branches": entry.branches}
            wrong += circumstance.missing(witness)
            wrong += [
                f"no {what}: {witness}"
                for what, must in wanted.items()
                if must and getattr(witness, what) < MUST_HAPPEN
            ]
        self._counts["cells"] += len(cases)
        self._counts["tokens"] += sum(len(c.token_ids) for output in outputs for c in output.outputs)
        self._counts["accepted"] += witness.accepted
        return wrong

    def _subject(self, owner: Any, entry: Entry, engine: Mapping[str, Any]) -> Any:
        """An engine, shared by the circumstances that want the same one."""
        from specdecode.testing.matrix import Subject

        if owner != self._owner:
            self.close()
            self._owner = owner
        key = repr(sorted(engine.items()))
        if key not in self._open:
            self._open[key] = Subject(
                str(self._lab.target),
                entry.config,
                engine,
                device=self._lab.device.type,
                tokenizer=self._tokenizer,
            )
        return self._open[key]

    def abandon(self) -> None:
        """Let go of engines in which something went wrong."""
        self._open.clear()

    def close(self) -> None:
        """Shut all engines down; nothing may be left in them."""
        while self._open:
            self._open.popitem()[1].close()


@pytest.fixture(scope="session")
def matrix(
    lab: Any, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[Matrix]:
    counts = pytestconfig.stash.setdefault(COUNTS, collections.Counter())
    matrix = Matrix(lab, tmp_path_factory.mktemp("words"), counts)
    yield matrix
    matrix.close()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "proposer" in metafunc.fixturenames:  # the outer one, so that circumstances share engines
        metafunc.parametrize("proposer", PROPOSERS)
    if "circumstance" in metafunc.fixturenames:
        from specdecode.testing.matrix import CIRCUMSTANCES

        metafunc.parametrize("circumstance", CIRCUMSTANCES, ids=lambda circumstance: circumstance.name)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    counts = config.stash.get(COUNTS, None)
    if counts:
        told = ", ".join(f"{number:,} {what}" for what, number in counts.items())
        terminalreporter.write_line(f"matrix, compared with the reference: {told}")
