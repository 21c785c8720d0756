"""A proposer's life over recorded texts: the contract without a model, without a GPU and without torch.

Verification compares drafts with what the target would have said. Of a recorded answer that is known, so a
method that reads tokens alone can be driven, tested and judged by the record.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import numpy as np

from specdecode.contract import (
    Commit,
    Drafts,
    Needs,
    Place,
    Probs,
    Proposer,
    RequestInfo,
    Shape,
    StepView,
    TargetInfo,
    TargetTokenizer,
    Unsupported,
)
from specdecode.engine.ordering import Taken, in_order
from specdecode.sampling_params import SamplingParams


@attrs.frozen(kw_only=True)
class Recorded:
    """A prompt and what was answered to it, as token ids; an answer has one token at least."""

    prompt: Sequence[int] = attrs.field(validator=attrs.validators.min_len(1))
    answer: Sequence[int] = attrs.field(validator=attrs.validators.min_len(1))
    namespace: str = ""  #: whose texts a method with ``memory=NAMESPACE`` may remember together


def recorded_target(vocab_size: int, tokenizer: TargetTokenizer | None = None) -> TargetInfo:
    """What a method is told where texts are replayed; one that wants more of its target cannot be."""
    return TargetInfo(
        path="",
        architecture="recorded",
        vocab_size=vocab_size,
        hidden_size=0,
        num_layers=0,
        num_heads=0,
        num_kv_heads=0,
        head_dim=0,
        max_model_len=1 << 24,
        dtype="float32",
        device="cpu",
        tokenizer=tokenizer,
        recorded=True,
    )


@attrs.define(kw_only=True)
class Replayed:
    """What a proposer would have given; counts as the engine's metrics have them.

    A verification is a step behind the one that computes the prompt, whether it had drafts or not.
    """

    tokens: int = 0  #: committed by verifications
    verifications: int = 0
    drafts: int = 0  #: verifications that had drafts
    drafted: int = 0
    accepted: int = 0
    accepted_at: list[int] = attrs.Factory(list)  #: by level, the first one first
    proposing_seconds: float = 0.0

    @property
    def tokens_per_step(self) -> float:
        """Block efficiency: an upper bound of the speedup where verifying costs nothing."""
        return self.tokens / self.verifications if self.verifications else 0.0

    @property
    def acceptance_length(self) -> float:
        """Tokens of a verification that had drafts, the target's own counted."""
        return 1 + self.accepted / self.drafts if self.drafts else 0.0

    @property
    def acceptance_rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0


@attrs.define(eq=False)
class _Row:
    id: str
    text: Recorded
    ids: list[int]  # committed
    fed: int = 1  # the first token that was not fed yet
    drafts: Taken = attrs.Factory(Taken)

    @property
    def left(self) -> int:
        return len(self.text.prompt) + len(self.text.answer) - len(self.ids)


class DryEngine:
    """Drives a proposer as the engine would, over texts whose continuation is known.

    Args:
        proposer: built, not loaded.
        needs: what it declared.
        vocab_size: ids at or above it, and below 0, cut a draft.
        max_num_seqs: rows of a step.

    Raises:
        Unsupported: it needs what only a model has: hidden states, layers, modules, or the device.
    """

    def __init__(self, proposer: Proposer, needs: Needs, *, vocab_size: int, max_num_seqs: int = 1) -> None:
        wanted = [name for name in ("taps", "kv", "modules") if getattr(needs, name)]
        wanted += ["place=DEVICE"] if needs.place is Place.DEVICE else []
        wanted += ["probs=FULL"] if needs.probs is Probs.FULL else []
        if wanted:
            raise Unsupported(
                f"a method that needs {', '.join(wanted)} cannot be replayed without its target"
            )
        self._proposer, self._needs, self._vocab_size = proposer, needs, vocab_size
        self._max_num_seqs = max_num_seqs
        self._count = 0

    def replay(self, texts: Iterable[Recorded]) -> Replayed:
        """Answer every text, first come first served; what the proposer remembers stays for the next call."""
        waiting, running, total = deque(texts), list[_Row](), Replayed()
        while waiting or running:
            while waiting and len(running) < self._max_num_seqs:
                running.append(self._admit(waiting.popleft()))
            commits = [self._verify(row, total) for row in running]
            self._proposer.on_commit(commits)
            self._propose(running, total)
            for row in running:
                if not row.left:
                    self._proposer.on_finish(row.id, "length")
            running = [row for row in running if row.left]
        return total

    def _admit(self, text: Recorded) -> _Row:
        self._count += 1
        row = _Row(f"replay-{self._count}", text, list(text.prompt))
        info = RequestInfo(
            id=row.id,
            namespace=text.namespace,
            token_ids=tuple(text.prompt),
            prompt_len=len(text.prompt),
            params=_params(row),
            resumed=False,
        )
        self._proposer.on_add(info)
        return row

    def _verify(self, row: _Row, total: Replayed) -> Commit:
        begun = len(row.ids) - len(row.text.prompt)
        accepted = accepted_nodes(row.drafts, row.text.answer[begun:])
        new = list(row.text.answer[begun : begun + accepted + 1])
        row.ids.extend(new)
        if begun:
            total.verifications += 1
            total.tokens += len(new)
            total.drafts += bool(row.drafts.ids)
            total.drafted += len(row.drafts.ids)
            total.accepted += accepted
            total.accepted_at += [0] * (accepted - len(total.accepted_at))
            for level in range(accepted):
                total.accepted_at[level] += 1
        return Commit(id=row.id, token_ids=tuple(new), accepted=accepted, prefill=not begun)

    def _propose(self, rows: Sequence[_Row], total: Replayed) -> None:
        source = _Source(rows, self._needs)
        out = source.drafts(self._needs)
        began = time.perf_counter()
        self._proposer.propose(StepView(self._needs, source), out)
        total.proposing_seconds += time.perf_counter() - began
        for index, row in enumerate(rows):
            row.fed = len(row.ids)
            count = min(max(0, int(out.lens[index])), int(source.budget[index]))
            row.drafts, _ = in_order(
                out.ids[index, :count].tolist(),
                out.parents[index, :count].tolist(),
                int(source.room[index]),
                self._vocab_size,
                chain=self._needs.shape is Shape.CHAIN,
            )


def accepted_nodes(drafts: Taken, follows: Sequence[int]) -> int:
    """How many levels of the drafts go along ``follows``; of equal siblings the first counts."""
    edges = list(zip(drafts.ids, drafts.parents, strict=True))
    node, count = -1, 0
    while count < len(follows) - 1:
        node = next((i for i, edge in enumerate(edges) if edge == (follows[count], node)), -2)
        if node == -2:
            break
        count += 1
    return count


class _Source:
    """The view's values, of a step of some rows."""

    def __init__(self, rows: Sequence[_Row], needs: Needs) -> None:
        self._rows = rows
        left = np.array([row.left for row in rows], np.int64)
        self.budget = np.where(left > 1, needs.width, 0)
        self.room = np.maximum(left - 1, 0)  # the last token is the target's own

    @property
    def width(self) -> int:
        return int(self.budget.max())

    def rows(self, name: str, place: Place) -> Any:
        rows = self._rows
        spans = [range(row.fed, len(row.ids)) for row in rows]
        lengths = np.array([len(span) for span in spans], np.int64)
        match name:
            case "budget" | "room":
                return getattr(self, name)
            case "request_ids":
                return [row.id for row in rows]
            case "params":
                return [_params(row) for row in rows]
            case "allowed":
                return None
            case "history":
                return [row.ids for row in rows]
            case "committed_len":
                return np.array([len(row.ids) for row in rows], np.int64)
            case "last_token":
                return np.array([row.ids[-1] for row in rows], np.int64)
            case "positions":
                return np.array([at for span in spans for at in span], np.int64)
            case "ids":
                return np.array([row.ids[at] for row, span in zip(rows, spans, strict=True) for at in span])
            case "rows":
                return np.repeat(np.arange(len(rows)), lengths)
            case "last":
                return np.cumsum(lengths) - 1
        raise KeyError(name)

    def drafts(self, needs: Needs) -> Drafts:
        shape = (len(self._rows), needs.width)
        return Drafts(
            ids=np.zeros(shape, np.int64),
            lens=np.zeros(shape[0], np.int64),
            parents=np.tile(np.arange(-1, needs.width - 1), (shape[0], 1)),
            score=np.zeros(shape, np.float32),
        )

    def limit(self, name: str, value: Any, bound: int, place: Place) -> Any:
        return np.minimum(value, bound)

    def behind(self, name: str, drafts: Sequence[Drafts], place: Place) -> Any:
        from ..engine.continuing import behind  # which imports torch: for combinations alone

        return behind(self, name, drafts, place)

    def own_len(self, kv: range, place: Place) -> Any:
        raise _absent("own_len")

    def taps(self, taps: tuple[Any, ...]) -> tuple[Any, ...]:
        raise _absent("taps")

    def ctx(self, kv: int, rows: Any, slots: Any, base: Any, extra: Any) -> Any:
        raise _absent("ctx")

    def sample(self, logits: Any, rows: Any, positions: Any, k: int, vocabulary: Any) -> tuple[Any, Any]:
        raise _absent("sample")

    def probs(self, logits: Any, rows: Any, positions: Any, ids: Any, vocabulary: Any) -> Any:
        raise _absent("probs")


def _absent(name: str) -> Unsupported:
    return Unsupported(f"StepView.{name} is not there without a target: this is a replay of recorded texts")


def _params(row: _Row) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=len(row.text.answer))
