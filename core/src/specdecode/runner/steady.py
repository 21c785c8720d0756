"""A step of rows in their seats: from the last step's drafts to this step's tokens, without the host.

Prepare the inputs, run the target, draw its tokens, accept, move the KV of accepted nodes, draft. All of
it has static shapes, so that on a GPU it is one captured graph for each number of rows and tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import attrs
import torch
from specdec_kernels import kv_write, sampling, verification
from specdec_kernels.attention import AttentionMetadata

from ..contract import Bucket, Tap
from ..models import Capturable
from .graphs import Graphs, bucket_for, row_buckets
from .runner import ModelRunner
from .seats import Seats, StepInputs, StepResults


@attrs.frozen(eq=False)
class SteadyOutput:
    """What one step of ``B`` rows of ``T`` tokens left in tensors that the next one overwrites."""

    rows: int
    tokens: int
    inputs: StepInputs
    results: StepResults
    taps: dict[Tap, torch.Tensor]  #: each ``[B * T, hidden]``


#: Drafts for the next step into ``seats.drafts``; may be captured if the proposer can be.
Draft = Callable[[SteadyOutput], None]

#: Replays that a step's time is the mean of.
_TIMED = 2


class SteadyStep:
    """Runs steps over the seats, captured where ``graphs`` are enabled."""

    def __init__(
        self,
        runner: ModelRunner,
        seats: Seats,
        graphs: Graphs,
        *,
        rates: torch.Tensor | None = None,
        widths: Sequence[int] = (),
        most_tokens: int | None = None,
    ) -> None:
        """What runs over ``seats``.

        Args:
            rates: ``[width]`` float32, of the synthetic rule: what of the drafts is to be accepted.
            widths: numbers of drafts of a row that steps may have beside none and as many as there can be.
            most_tokens: of a step with more than one draft a row; None: it may have any number.
        """
        self.seats = seats
        self.graphs = graphs
        self._runner = runner
        self.rates = rates
        shape = seats.shape
        self._most_tokens = most_tokens
        self._sizes = sorted({1, shape.width + 1, *(1 + width for width in widths)}, reverse=True)
        self._inputs = {size: StepInputs.allocate(shape, size, seats.device) for size in self._sizes}
        self._results = {size: StepResults.allocate(shape.rows, size, seats.device) for size in self._sizes}
        rows = torch.arange(shape.rows, device=seats.device)
        self._rows_of = {size: rows.repeat_interleave(size) for size in self._sizes}
        self._buckets = row_buckets(shape.rows)
        self._captured: dict[Bucket, Callable[[], SteadyOutput]] = {}
        self._adapted: dict[
            Bucket, Callable[[], SteadyOutput]
        ] = {}  # the same with adapters, if there is room
        self._draft_captured = False
        self._resting: dict[tuple[int, bool], Callable[[], SteadyOutput]] = {}  # by rows, and with adapters

    @property
    def captured(self) -> bool:
        """Whether steps are replayed, with their drafting if it could be captured."""
        return bool(self._captured)

    @property
    def drafts(self) -> bool:
        """Whether steps are replayed and draft."""
        return self.captured and self._draft_captured

    def capture(self, draft: Draft | None, *, rests: bool = False) -> None:
        """Record a graph of each bucket; all seats must be empty. ``draft`` becomes part of them.

        A model that has to be tried may fail in a bucket; then there are none.

        Args:
            rests: record plain steps without ``draft`` as well.
        """
        if not self.graphs.enabled:
            return
        model = self._runner.model
        tried = model.capturable is Capturable.TRIED
        with self.graphs.attempt(model.code) if tried else nullcontext():
            try:
                self._record(draft, rests and draft is not None)
            except BaseException:
                self.forget()  # before memory is given back, which the graphs' results would hold
                raise

    def _record(self, draft: Draft | None, rests: bool) -> None:
        self._draft_captured = draft is not None
        for tokens in self._sizes:
            for rows in reversed(self._buckets):  # the largest first: the others find its memory
                if tokens - 1 not in self.widths(rows):
                    continue

                def step(adapted: bool = False, *, rows: int = rows, tokens: int = tokens) -> SteadyOutput:
                    return self._step(rows, tokens, draft, adapted)

                bucket = Bucket(rows, tokens)
                if self._runner.model.adapters is not None:
                    self._adapted[bucket] = self.graphs.capture(partial(step, True), (bucket, "adapted"))
                self._captured[bucket] = self.graphs.capture(step, bucket)
        for rows in reversed(self._buckets if rests else ()):
            for adapted in {False, self._runner.model.adapters is not None}:
                plain = partial(self._step, rows, 1, self._no_drafts, adapted)
                self._resting[rows, adapted] = self.graphs.capture(plain, (rows, adapted, "resting"))

    def forget(self) -> None:
        """Give the graphs' memory back, and what communicates in them; no step comes any more."""
        self._captured.clear()
        self._adapted.clear()
        self._resting.clear()
        self._draft_captured = False
        self.graphs.clear()

    def bucket(self, rows: int) -> int:
        """How many rows are computed where ``rows`` seats are taken."""
        return bucket_for(rows, self._buckets) if self._captured else rows

    def widths(self, rows: int) -> tuple[int, ...]:
        """Numbers of drafts of a row that a step over ``rows`` seats may verify, ascending from 0."""
        widths = sorted(size - 1 for size in self._sizes)
        if self._most_tokens is not None:
            most = self._most_tokens // bucket_for(rows, self._buckets)
            widths = [width for width in widths if width <= 1 or width < most]
        return tuple(widths)

    @torch.inference_mode()
    def measure(self) -> dict[tuple[int, int], float]:
        """``(rows, tokens of a row) -> seconds`` of the captured steps; all seats must be empty."""
        found = {
            (own.rows, own.steps): self._time(replay, own.steps) for own, replay in self._captured.items()
        }
        self.seats.clear()
        return found

    @torch.inference_mode()
    def measure_resting(self) -> dict[int, float]:
        """``rows -> seconds`` of the captured plain steps without drafting; all seats must be empty."""
        found = {
            rows: self._time(replay, 1) for (rows, adapted), replay in self._resting.items() if not adapted
        }
        self.seats.clear()
        return found

    def _time(self, replay: Callable[[], SteadyOutput], tokens: int) -> float:
        """Seconds of a captured step of ``tokens`` tokens a row."""
        marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(1 + _TIMED)]
        for start, end in marks:  # the first lets the host run ahead
            self.seats.rehearse(tokens - 1, self._runner.num_blocks)
            start.record()
            replay()
            end.record()
        torch.cuda.synchronize(self.seats.device)
        return sum(start.elapsed_time(end) for start, end in marks[1:]) / _TIMED / 1e3

    def run(self, rows: int, tokens: int, draft: Draft | None) -> SteadyOutput:
        """Enqueue one step over the first ``rows`` seats; if none has an adapter, one without any.

        Args:
            tokens: 1, or one more than one of :meth:`widths` to verify drafts.
            draft: called behind the verification, unless it is part of the graphs.
        """
        adapted = self.seats.adapted
        if not self._captured:
            return self._step(rows, tokens, draft, adapted)
        graphs = self._adapted if adapted else self._captured
        output = graphs[Bucket(bucket_for(rows, self._buckets), tokens)]()
        if draft is not None and not self._draft_captured:
            draft(output)
        return output

    def rest(self, rows: int) -> SteadyOutput:
        """Enqueue one plain step over the first ``rows`` seats that leaves the proposer out."""
        adapted = self.seats.adapted
        if not self._captured:
            return self._step(rows, 1, self._no_drafts, adapted)
        if self._resting:
            return self._resting[bucket_for(rows, self._buckets), adapted]()
        return self.run(rows, 1, self._no_drafts)  # no graph has the proposer in it

    def _no_drafts(self, output: SteadyOutput) -> None:
        self.seats.drafts.lens.zero_()

    def _step(self, rows: int, tokens: int, draft: Draft | None, adapted: bool = False) -> SteadyOutput:
        output = self._target(rows, tokens, adapted)
        if draft is not None:
            draft(output)
        return output

    @torch.inference_mode()
    def _target(self, rows: int, tokens: int, adapted: bool) -> SteadyOutput:
        seats, shape = self.seats, self.seats.shape
        inputs, results = self._inputs[tokens].first(rows), self._results[tokens].first(rows)
        committed, limit, active = seats.committed[:rows], seats.limit[:rows], seats.active[:rows]
        width = tokens - 1
        verification.next_inputs(
            seats.last[:rows],
            seats.drafts.ids[:rows, : max(width, 1)],
            seats.drafts.lens[:rows],
            seats.drafts.parents[:rows, : max(width, 1)] if shape.tree else None,
            committed,
            limit,
            active,
            seats.budget[:rows],
            seats.table[:rows],
            block_size=shape.block_size,
            vocab_size=shape.vocab_size,
            depth=max(shape.depth, 1),
            ids=inputs.ids,
            lens=inputs.lens,
            parents=inputs.parents,
            positions=inputs.positions,
            write_slots=inputs.write_slots,
            base=inputs.base,
            extra=inputs.extra,
            faults=seats.faults,
        )
        self._runner.check(inputs.write_slots.flatten())
        adapters = None
        if adapted:
            adapters = seats.adapter[self._rows_of[tokens][: rows * tokens]]
        hidden, taps = self._runner.target(
            inputs.ids.flatten(), self._metadata(inputs, rows, tokens), adapters
        )
        # Of the tokens drawn; in a chain the first slot that is not seen has that number.
        positions = (inputs.positions + 1 if shape.tree and width else inputs.base).flatten()
        targets = sampling.draw_tokens(
            self._runner.model.logits(hidden),
            positions,
            seed=seats.seed[:rows],
            index=seats.index[:rows],
            temperature=seats.temperature[:rows],
            top_k=seats.top_k[:rows],
            top_p=seats.top_p[:rows],
            min_p=seats.min_p[:rows],
            tokens_per_row=tokens,
        )
        verification.accept(
            targets.view(rows, tokens),
            inputs.ids,
            inputs.lens,
            inputs.parents if shape.tree else None,
            committed,
            limit,
            active,
            tokens=results.tokens,
            counts=results.counts,
            path=results.path,
            history=None if seats.history is None else seats.history[:rows],
            result=results.report,
            last=seats.last[:rows],
            rates=None if self.rates is None or not width else self.rates,
            seed=seats.seed[:rows],
        )
        if shape.tree and width:
            moves = verification.accepted_moves(
                committed, results.counts, results.path, seats.table[:rows], block_size=shape.block_size
            )
            kv_write.move_slots(self._runner.store.target, *moves)
        return SteadyOutput(rows, tokens, inputs, results, taps)

    def _metadata(self, inputs: StepInputs, rows: int, tokens: int) -> AttentionMetadata:
        extra = inputs.extra
        return AttentionMetadata(
            rows=self._rows_of[tokens][: rows * tokens],
            positions=inputs.positions.flatten(),
            write_slots=inputs.write_slots.flatten(),
            base=inputs.base.flatten(),
            block_table=self.seats.table[:rows],
            block_size=self.seats.shape.block_size,
            extra=None if extra is None else extra.flatten(0, 1),
            tokens_per_row=tokens,
            max_slots=self._runner.max_slots,
        )
