"""What the sampler has to know of each token to draw, and the target's own tokens of a step."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from ..sampling.batch import SampleRow, SamplingBatch
from ..sampling.laws import law
from ..sampling.mask import TokenMask
from ..sampling.processors import ProcessorFault
from ..sampling.sampler import UNDRAWABLE, draw
from .plan import RowPlan, StepPlan
from .request import Request

logger = logging.getLogger(__name__)

NAN_LOGITS = "the model gave NaN logits: check its weights, or load it with dtype='float32'"


def sample_row(
    request: Request, position: int, path: tuple[int, ...] = (), mask: TokenMask | None = None
) -> SampleRow:
    """The draw of token ``position`` of ``request``, after the drafts ``path``.

    Its logits processors are left out: they are for the target's own draws.

    Args:
        mask: what its grammar allows behind ``path``; of the next token it is known without. Behind
            drafts that are not told (to a drafter) it is None.
    """
    if mask is None and request.grammar is not None and not path and position == len(request.token_ids):
        mask = request.grammar.mask
    return SampleRow(
        params=request.params,
        seed=request.seed,
        index=request.index,
        position=position,
        num_output=position - len(request.prompt_ids),
        history=request.history,
        path=path,
        stop_ids=request.stop_ids,
        banned=_banned(request, position, path),
        mask=mask,
    )


def _banned(request: Request, position: int, path: tuple[int, ...]) -> tuple[int, ...]:
    """What bad words exclude. Behind drafts that are not told (to a drafter), words of one token only."""
    words, committed = request.bad_words, len(request.token_ids)
    if words is None:
        return ()
    if position != committed + len(path):
        return words.after(())
    start = max(len(request.prompt_ids), committed - words.reach)
    return words.after((*request.token_ids[start:], *path))


def verification_rows(row: RowPlan) -> list[SampleRow]:
    """One for each logits row of ``row``: the last token's, then each draft's."""
    if not row.samples:
        return []
    request, committed = row.request, len(row.request.token_ids)
    ids, parents = row.drafts.ids, row.drafts.parents
    paths = [(), *(tuple(ids[node] for node in path) for path in row.drafts.paths())]
    masks = request.grammar.masks(ids, parents) if request.grammar else [None] * len(paths)
    return [
        sample_row(request, committed + len(path), path, mask)
        for path, mask in zip(paths, masks, strict=True)
    ]


@attrs.define(eq=False)
class LazyTargets(Sequence[int]):
    """The target's tokens of one row, each drawn when it is asked for; or their laws.

    For requests with logits processors. Verification asks for a token only where the drafts before it
    were accepted, so a processor is called once for each token of the output, in order, just as
    without drafts: it may keep a state, and never sees a draft that was rejected.
    """

    request: Request
    logits: torch.Tensor  #: ``[len(rows), V]``
    rows: Sequence[SampleRow]
    fault: ProcessorFault | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: Any) -> Any:
        drawn = self._processed(place, draw)
        return UNDRAWABLE if drawn is None else int(drawn)

    def law(self, place: int) -> torch.Tensor:
        """``[V]`` float32: the law of a token; all 0 where there is none to draw."""
        probs = self._processed(place, law)
        return self.logits.new_zeros(self.logits.shape[-1]) if probs is None else probs[0]

    def _processed(
        self, place: int, read: Callable[[torch.Tensor, SamplingBatch], torch.Tensor]
    ) -> torch.Tensor | None:
        """What ``read`` makes of the logits, processors and all; None where there is nothing to draw."""
        request, row = self.request, self.rows[place]
        assert request.processors is not None
        output_ids = [*request.token_ids[len(request.prompt_ids) :], *row.path]
        row = attrs.evolve(row, process=functools.partial(request.processors, output_ids))
        logits = self.logits[place : place + 1]
        if logits.isnan().any():
            return None  # not to be shown to anybody
        try:
            return read(logits, SamplingBatch.build([row], logits.shape[-1], logits.device))
        except ProcessorFault as fault:
            logger.warning("request %s ends: %s", request.id, fault, exc_info=fault.__cause__)
            self.fault = fault
            return None


def draw_targets(
    plan: StepPlan,
    rows: Sequence[Sequence[SampleRow]],
    logits: torch.Tensor,
    offsets: Sequence[int],
    vocab_size: int,
) -> list[Sequence[int]]:
    """For each row of ``plan`` the target's token after its last token and after each of its drafts.

    Args:
        rows: what :func:`verification_rows` gives for each row, or nothing if it is not to be drawn.
        logits: ``[R, vocab_size]``, row after row.
        offsets: index into R of each row's first; -1 if it draws nothing.

    Returns:
        Empty for a row that draws nothing; ``UNDRAWABLE`` where there is no token to draw.
    """
    targets: list[Sequence[int]] = [()] * len(rows)
    together: list[int] = []
    for index, (row, draws, first) in enumerate(zip(plan.rows, rows, offsets, strict=True)):
        if draws and row.request.processors is not None:
            targets[index] = LazyTargets(row.request, logits[first : first + len(draws)], draws)
        elif draws:
            together.append(index)
    flat = [sample for index in together for sample in rows[index]]
    if not flat:
        return targets
    if len(flat) < len(logits):
        logits = logits[[offsets[index] + place for index in together for place in range(len(rows[index]))]]
    drawn = iter(draw(logits, SamplingBatch.build(flat, vocab_size, logits.device)).tolist())
    for index in together:
        targets[index] = [*itertools.islice(drawn, len(rows[index]))]
    return targets


def why_undrawable(
    request: Request, targets: Sequence[int], path: Sequence[int], logits: torch.Tensor
) -> str:
    """What to tell of ``logits`` ``[V]`` that gave :data:`UNDRAWABLE` after the accepted drafts ``path``."""
    if logits.isnan().any():
        return NAN_LOGITS
    if isinstance(targets, LazyTargets) and targets.fault is not None:
        return str(targets.fault)
    if request.grammar is not None and (why := request.grammar.why_nothing(path)):
        return f"structured_outputs: {why}"
    return (
        "no token is left to draw: structured_outputs, allowed_token_ids, bad_words, min_tokens and "
        "logits_processors exclude all"
    )
