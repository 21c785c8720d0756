"""The draw of one token, written out from ``docs/sampling.md``: one row, float64, no kernel but the noise.

It shares no transform with the engine's sampler, so that a fault in either shows as a difference.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any

import attrs
import torch
from specdec_kernels.noise import gumbel

from ..api.params import SamplingParams

_OUT = float("-inf")


class NoToken(Exception):
    """There is no token to draw; the message is part of the engine's."""


@attrs.frozen(kw_only=True)
class Draw:
    """One token to draw: under which parameters, and after what."""

    params: SamplingParams
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    seed: int  #: 64 bits as a signed integer
    index: int = 0  #: which completion of the prompt
    eos_ids: Collection[int] = ()  #: that end the request: none under ``ignore_eos``
    bad_words: Sequence[Sequence[int]] = ()  #: token ids of each form of each word
    processors: Sequence[Callable[..., Any]] = ()  #: this completion's own
    allowed: Collection[int] | None = None  #: what a grammar allows here


def next_token(logits: torch.Tensor, draw: Draw) -> int:
    """The token drawn from ``logits`` ``[V]``, which are left as they are.

    Raises:
        NoToken: the logits are NaN, a processor failed, or every token is excluded.
    """
    if logits.isnan().any():
        raise NoToken("the model gave NaN logits")
    scores = _processed(_masked(logits.double(), draw), draw)
    _penalize(scores, draw)
    if not draw.params.greedy:
        scores = _truncated(scores / draw.params.temperature, draw.params)
        position = len(draw.prompt_ids) + len(draw.output_ids)
        seed, index, place = (
            torch.tensor([part], device=scores.device) for part in (draw.seed, draw.index, position)
        )
        scores = scores + gumbel(seed, index, place, len(scores))[0]
    token = int(scores.argmax())  # the first of equal ones
    if scores[token] == _OUT:
        raise NoToken("no token is left to draw")
    return token


def _masked(scores: torch.Tensor, draw: Draw) -> torch.Tensor:
    """Allowed ids, bad words, ``min_tokens`` and the bias, in this order."""
    params, output = draw.params, list(draw.output_ids)
    excluded = _forbidden(draw, len(scores))
    kept = set(range(len(scores))) - excluded
    for *beginning, last in draw.bad_words:
        if output[len(output) - len(beginning) :] == beginning:
            excluded.add(last)
    stops = {*draw.eos_ids, *params.stop_token_ids}
    if len(output) < params.min_tokens and not stops.issuperset(kept):
        excluded |= stops
    scores[sorted(excluded)] = _OUT
    for token, bias in (params.logit_bias or {}).items():
        scores[token] += bias
    return scores


def _forbidden(draw: Draw, vocab_size: int) -> set[int]:
    """What the grammar or ``allowed_token_ids`` leave out."""
    lists = [
        permitted for permitted in (draw.params.allowed_token_ids, draw.allowed) if permitted is not None
    ]
    return set(range(vocab_size)).difference(set(range(vocab_size)).intersection(*map(set, lists)))


def _processed(scores: torch.Tensor, draw: Draw) -> torch.Tensor:
    for processor in draw.processors:
        with_prompt = len(inspect.signature(processor).parameters) == 3
        ids = [list(draw.prompt_ids)] * with_prompt + [list(draw.output_ids)]
        try:
            scores = processor(*ids, scores.float()).double()
        except Exception as error:
            raise NoToken(f"{type(error).__name__}: {error}") from error
    if draw.processors and draw.allowed is not None:  # a processor does not overrule the grammar
        scores[sorted(set(range(len(scores))).difference(draw.allowed))] = _OUT
    return scores


def _penalize(scores: torch.Tensor, draw: Draw) -> None:
    params, output = draw.params, list(draw.output_ids)
    for token in {*draw.prompt_ids, *output}:
        score = float(scores[token])
        score = score / params.repetition_penalty if score > 0 else score * params.repetition_penalty
        used = output.count(token)
        score -= params.frequency_penalty * used + params.presence_penalty * (used > 0)
        scores[token] = score


def _truncated(scores: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """``min_p``, ``top_k``, ``top_p``: each keeps all that equal the last token kept."""
    if params.min_p > 0:
        probs = scores.softmax(-1)
        scores = scores.where(probs >= params.min_p * probs.max(), _OUT)
    if 0 < params.top_k < len(scores):
        scores = scores.where(scores >= scores.sort(descending=True).values[params.top_k - 1], _OUT)
    if params.top_p < 1:
        ranked = scores.sort(descending=True).values
        mass_before = ranked.softmax(-1).cumsum(-1) - ranked.softmax(-1)
        scores = scores.where(scores >= ranked[mass_before < params.top_p][-1], _OUT)
    return scores
