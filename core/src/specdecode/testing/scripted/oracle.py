"""Host proposers that replay known texts: what they draft is right, wrong or short where a test wants it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from ...contract import Drafts, Proposer, RequestInfo, StepView
from .config import OracleConfig, OracleTreeConfig, ScriptFields


class Script:
    """Texts, asked for what follows a history."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self._texts = [list(text) for text in texts]

    def follow(self, history: Sequence[int], count: int) -> list[int]:
        """At most ``count`` ids after ``history`` in the first text that goes on from it."""
        known = list(history)
        for text in self._texts:
            if len(text) > len(known) and text[: len(known)] == known:
                return text[len(known) : len(known) + count]
        return []


def history_of(step: StepView, row: int) -> list[int]:
    """All committed ids of a row, on whichever side the proposer works."""
    return [int(token) for token in step.history[row][: int(step.committed_len[row])]]


def spoil(token_id: int, vocab_size: int) -> int:
    """Another id of the vocabulary."""
    return (token_id + 1) % vocab_size


def write_row(out: Drafts, row: int, ids: Sequence[int]) -> None:
    """Make ``ids`` the chain drafted for ``row``."""
    for offset, token_id in enumerate(ids):
        out.ids[row, offset] = token_id
    out.lens[row] = len(ids)


class OracleProposer(Proposer):
    """Replays the text as a chain, spoiling the offsets in ``wrong_at``."""

    def __init__(self, config: OracleConfig, vocab_size: int) -> None:
        self._script = Script(config.texts)
        self._wrong = frozenset(config.wrong_at)
        self._vocab_size = vocab_size

    def propose(self, step: StepView, out: Drafts) -> None:
        for row, count in enumerate(np.minimum(step.budget, step.room).tolist()):
            write_row(out, row, self._chain(step.history[row], count))

    def _chain(self, history: Sequence[int], count: int) -> list[int]:
        return [
            spoil(token_id, self._vocab_size) if offset in self._wrong else token_id
            for offset, token_id in enumerate(self._script.follow(history, count))
        ]


class RaggedProposer(Proposer):
    """Replays 0, 1, ..., k, 0, 1, ... tokens of the text, each request in a cycle of its own."""

    def __init__(self, config: ScriptFields) -> None:
        self._script = Script(config.texts)
        self._period = config.num_speculative_tokens + 1
        self._turns: dict[str, itertools.count[int]] = {}

    def on_add(self, request: RequestInfo) -> None:
        if not request.resumed:
            self._turns[request.id] = itertools.count()

    def on_finish(self, request_id: str, reason: str) -> None:
        del self._turns[request_id]

    def propose(self, step: StepView, out: Drafts) -> None:
        for row, request_id in enumerate(step.request_ids):
            turn = next(self._turns[request_id]) % self._period
            count = min(turn, int(step.budget[row]), int(step.room[row]))
            write_row(out, row, self._script.follow(step.history[row], count))


class OracleTreeProposer(Proposer):
    """Hides the text in a tree: its nodes stand between decoys, some of which repeat an earlier sibling.

    The tree of a history is the same whenever it is asked for.
    """

    def __init__(self, config: OracleTreeConfig, vocab_size: int) -> None:
        self._config = config
        self._script = Script(config.texts)
        self._vocab_size = vocab_size

    def propose(self, step: StepView, out: Drafts) -> None:
        for row, history in enumerate(step.history):
            count, levels = int(step.budget[row]), min(int(step.room[row]), self._config.levels)
            if count and levels:
                ids, parents = self._tree(history, count, levels)
                write_row(out, row, ids)
                for node, parent in enumerate(parents):
                    out.parents[row, node] = parent

    def _tree(self, history: Sequence[int], count: int, levels: int) -> tuple[list[int], list[int]]:
        """``count`` nodes of at most ``levels`` levels, parent before child."""
        rng = np.random.default_rng([self._config.seed, *history])
        text = self._script.follow(history, levels)
        ids: list[int] = []
        parents: list[int] = []
        depths: list[int] = []
        true_path = [-1]
        for node in range(count):
            if len(true_path) <= len(text) and rng.random() >= self._config.decoys:
                parent, token_id = true_path[-1], text[len(true_path) - 1]
                true_path.append(node)
            else:
                inner = [-1, *(n for n in range(node) if depths[n] < levels)]
                parent = inner[rng.integers(len(inner))]
                siblings = [ids[n] for n in range(node) if parents[n] == parent]
                repeats = bool(siblings) and rng.random() < 0.2
                token_id = siblings[0] if repeats else int(rng.integers(self._vocab_size))
            ids.append(token_id)
            parents.append(parent)
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return ids, parents
