"""Why two outputs of one request differ: by rounding, or by a fault.

In exact arithmetic speculation changes nothing. In bfloat16 a product of one row and of several may
round differently, and where the two best tokens are as good as equal that decides which is drawn.
Whether it can have been so is told by scoring the shared prefix again in one dense forward.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Literal

import attrs
import torch
from specdec_kernels.noise import gumbel

from ..layers import GivenEmbeddings
from ..models import Decoder, TransformersDecoder
from ..runner.dense import dense_forward
from ..sampling.batch import SamplingBatch
from ..sampling.sampler import transform
from .draws import sample_row
from .request import Request

#: How far below being drawn rounding may put a pick, in bfloat16 steps of the top logit.
TIE_STEPS = {torch.bfloat16: 2.0, torch.float16: 2.0 / 2**3, torch.float32: 2.0 / 2**9}
#: Gaps beyond this are reported as infinite.
_LARGEST_GAP = 1e4
#: Halvings of the interval a gap is known to lie in.
_GAP_BITS = 16

Kind = Literal["tie", "bug"]


@attrs.frozen(kw_only=True)
class Pick:
    """A token at the place where two outputs part, by a dense forward of what comes before."""

    token: int
    logit: float  #: the target's own
    noise: float  #: Gumbel noise; 0 for a greedy request
    score: float  #: the logit after the request's transforms, plus the noise; -inf: excluded
    gap: float  #: how much higher its logit would have to be for it to be drawn; 0: it may be drawn


@attrs.frozen(kw_only=True)
class Divergence:
    """The first difference between two outputs, and whether rounding accounts for it."""

    position: int  #: index into the outputs
    a: Pick | None  #: what the first output has there; None: it has ended
    b: Pick | None
    best: Pick  #: what the dense forward draws
    step: float  #: size of a bfloat16 step at the top logit (the picks', if they are larger)
    bound: float  #: most steps that are put down to rounding; see ``docs/exactness.md``

    @property
    def gap(self) -> float:
        """How far the farther pick is from being drawn, in logits; inf where an output has ended."""
        return max(math.inf if pick is None else pick.gap for pick in (self.a, self.b))

    @property
    def steps(self) -> float:
        """The gap in bfloat16 steps."""
        return self.gap / self.step

    @property
    def kind(self) -> Kind:
        """A tie: rounding may have decided. A bug: it cannot have."""
        return "tie" if self.steps <= self.bound else "bug"

    @property
    def wrong(self) -> str:
        """Which output rounding does not account for: "", "a", "b", or "ab".

        An output that ends where the other goes on is not told from the other by scores: "ab".
        """
        if self.a is None or self.b is None:
            return "ab"
        return "".join(
            name for name, pick in (("a", self.a), ("b", self.b)) if pick.gap > self.bound * self.step
        )

    def __str__(self) -> str:
        picks = " and ".join("the end" if pick is None else _shown(pick) for pick in (self.a, self.b))
        return (
            f"{self.kind} at output token {self.position}: {picks}; a dense forward draws "
            f"{_shown(self.best)}; gap {self.gap:.4g}, {self.steps:.3g} bf16 steps of {self.step:.4g} "
            f"(bound {self.bound:.3g})"
        )


def _shown(pick: Pick) -> str:
    noise = f" + noise {pick.noise:.4g}" if pick.noise else ""
    return f"{pick.token} (logit {pick.logit:.6g}{noise})"


def first_difference(ids_a: Sequence[int], ids_b: Sequence[int]) -> int | None:
    """The first index at which two outputs differ, the shorter one's length included; None: they do not."""
    for position, (one, other) in enumerate(zip(ids_a, ids_b, strict=False)):
        if one != other:
            return position
    return None if len(ids_a) == len(ids_b) else min(len(ids_a), len(ids_b))


@torch.inference_mode()
def explain(
    model: Decoder | TransformersDecoder,
    request: Request,
    ids_a: Sequence[int],
    ids_b: Sequence[int],
    given: GivenEmbeddings | None = None,
) -> Divergence | None:
    """Score again what two outputs of ``request`` share, and tell why they part; None: they do not.

    Args:
        request: as it was before its first token, queued nowhere; is used up.
        ids_a, ids_b: output token ids.
        given: embeddings of its prompt's images.
    """
    position = first_difference(ids_a, ids_b)
    if position is None:
        return None
    logits = _logits(model, request, ids_a[:position], given)
    score = _Scorer(request, logits.shape[-1], logits.device)
    scores = score(logits)
    best = int(scores[0].argmax())
    tokens = [ids[position] if position < len(ids) else None for ids in (ids_a, ids_b)]
    seen = [int(logits[0].argmax()), best, *(token for token in tokens if token is not None)]
    step = _step(float(logits[0, seen].abs().max()))

    def pick(token: int) -> Pick:
        logit, total = float(logits[0, token]), float(scores[0, token])
        noise = float(score.noise[0, token])
        return Pick(token=token, logit=logit, noise=noise, score=total, gap=_gap(score, logits, token, step))

    a, b = (None if token is None else pick(token) for token in tokens)
    return Divergence(position=position, a=a, b=b, best=pick(best), step=step, bound=TIE_STEPS[model.dtype])


def _logits(
    model: Decoder | TransformersDecoder,
    request: Request,
    output: Sequence[int],
    given: GivenEmbeddings | None = None,
) -> torch.Tensor:
    """``[1, V]`` logits of the token after ``output``, which is committed to ``request``."""
    ids = [*request.prompt_ids, *output]
    hidden, _ = dense_forward(model, ids, adapter=request.adapter_slot, given=given)
    if request.processors is None:
        request.commit(output)
        return model.compute_logits(hidden[-1:])
    last = len(request.prompt_ids) - 1
    for place, token in enumerate(output):  # a processor may keep a state: show it what it was shown
        logits = model.compute_logits(hidden[last + place :][:1])
        _Scorer(request, logits.shape[-1], logits.device)(logits)
        request.commit([token])
    return model.compute_logits(hidden[-1:])


class _Scorer:
    """``[1, V]`` logits of the next token of a request to what the largest of is drawn."""

    def __init__(self, request: Request, vocab_size: int, device: torch.device) -> None:
        row = sample_row(request, len(request.token_ids))
        if request.processors is not None:
            output_ids = request.token_ids[len(request.prompt_ids) :]
            row = attrs.evolve(row, process=_Once(functools.partial(request.processors, output_ids)))
        self._batch = SamplingBatch.build([row], vocab_size, device)
        keys = self._batch.noise
        self.noise = torch.zeros(1, vocab_size, device=device)
        if keys is not None:
            self.noise = gumbel(keys.seed, keys.index, keys.position, vocab_size)

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        return transform(logits, self._batch) + self.noise


class _Once:
    """Calls processors once; what they did to the first logits is done to the next ones."""

    def __init__(self, process: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._process = process
        self._first: tuple[torch.Tensor, torch.Tensor] | None = None

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        if self._first is None:
            self._first = (logits.clone(), self._process(logits))
        before, after = self._first
        return torch.where(before.isfinite(), logits + (after - before), after)


def _gap(score: _Scorer, logits: torch.Tensor, token: int, step: float) -> float:
    """How much higher the logit of ``token`` must be for it to be drawn.

    By trial, since penalties, temperature, top-k, top-p and min-p all stand between the two.
    """

    def drawn(more: float) -> bool:
        raised = logits.clone()
        raised[0, token] += more
        scores = score(raised)
        return bool(scores[0, token] > -math.inf and scores[0, token] >= scores.max())

    if drawn(0.0):
        return 0.0
    low, high = 0.0, step
    while not drawn(high):
        low, high = high, 2 * high
        if high > _LARGEST_GAP:
            return math.inf
    for _ in range(_GAP_BITS):
        middle = (low + high) / 2
        low, high = (low, middle) if drawn(middle) else (middle, high)
    return high


def _step(magnitude: float) -> float:
    """The distance of bfloat16 numbers, which have 8 significant bits, at ``magnitude``."""
    return 2.0 ** (math.frexp(magnitude)[1] - 8)
