"""Whether two results of a request are the same to whoever reads them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from ..api.outputs import CompletionOutput, Logprob, RequestOutput
from ..api.params import RequestOutputKind

#: Log-probabilities may differ by this much: float32 sums in another order.
LOGPROB_TOLERANCE = 1e-4

#: A token id -> its log-probability.
Entry = Mapping[int, Logprob]


def differences(got: RequestOutput, want: RequestOutput, *, atol: float = LOGPROB_TOLERANCE) -> Iterator[str]:
    """What differs: tokens, text, reasons, log-probabilities with their ranks and their number.

    Where two log-probabilities are nearer to each other than ``atol``, their order may differ.
    ``error`` of ``want`` may be a part of that of ``got``.
    """
    if list(got.prompt_token_ids) != list(want.prompt_token_ids):
        yield f"prompt_token_ids: {list(got.prompt_token_ids)}, not {list(want.prompt_token_ids)}"
    yield from _entries("prompt_logprobs", got.prompt_logprobs, want.prompt_logprobs, atol)
    if len(got.outputs) != len(want.outputs):
        yield f"{len(got.outputs)} outputs, not {len(want.outputs)}"
    for ours, theirs in zip(got.outputs, want.outputs, strict=False):
        yield from (f"outputs[{theirs.index}].{fault}" for fault in _completions(ours, theirs, atol))


def _completions(got: CompletionOutput, want: CompletionOutput, atol: float) -> Iterator[str]:
    for name in ("index", "text", "finish_reason", "stop_reason"):
        ours, theirs = getattr(got, name), getattr(want, name)
        if ours != theirs or type(ours) is not type(theirs):
            yield f"{name}: {ours!r}, not {theirs!r}"
    if list(got.token_ids) != list(want.token_ids):
        yield f"token_ids: {list(got.token_ids)}, not {list(want.token_ids)}"
    if (got.error is None) != (want.error is None) or (want.error or "") not in (got.error or ""):
        yield f"error: {got.error!r}, not {want.error!r}"
    yield from _entries("logprobs", got.logprobs, want.logprobs, atol)
    ours, theirs = got.cumulative_logprob, want.cumulative_logprob
    if (ours is None) != (theirs is None) or abs((ours or 0) - (theirs or 0)) > atol * max(
        1, len(want.token_ids)
    ):
        yield f"cumulative_logprob: {ours}, not {theirs}"


def _entries(
    name: str, got: Sequence[Entry | None] | None, want: Sequence[Entry | None] | None, atol: float
) -> Iterator[str]:
    if got is None or want is None:
        if got is not want:
            yield f"{name}: {got}, not {want}"
        return
    if len(got) != len(want):
        yield f"{name}: {len(got)} entries, not {len(want)}"
    for place, (ours, theirs) in enumerate(zip(got, want, strict=False)):
        if fault := _entry(ours, theirs, atol):
            yield f"{name}[{place}]: {fault}"


def _entry(got: Entry | None, want: Entry | None, atol: float) -> str | None:
    if got is None or want is None:
        return None if got is want else f"{got}, not {want}"
    if len(got) != len(want) or next(iter(got)) != next(iter(want)):
        return f"tokens {list(got)}, not {list(want)}"
    values = [entry.logprob for entry in want.values()]
    for place, (token, ours) in enumerate(got.items()):
        if abs(ours.logprob - values[place]) > atol:
            return f"{ours.logprob} of token {token} in place {place}, not {values[place]}"
        theirs = want.get(token)
        if theirs is not None and (ours.rank, ours.decoded_token) == (theirs.rank, theirs.decoded_token):
            continue
        # A tie within rounding, or with one that is not listed any more: either order is right.
        near = sum(abs(value - values[place]) <= atol for value in values)
        if near == 1 and not (theirs is None and place == len(values) - 1):
            return f"{ours} of token {token}, not {theirs}"
    return None


def joined(outputs: Sequence[RequestOutput], kind: RequestOutputKind) -> RequestOutput:
    """A request's outputs as one: deltas joined; of the other kinds the last.

    Raises:
        AssertionError: the outputs are not what ``kind`` says: something was taken back or told
            twice, or came after the end.
    """
    last = outputs[-1]
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    if kind is RequestOutputKind.FINAL_ONLY:
        assert len(outputs) == 1, f"FINAL_ONLY gave {len(outputs)} outputs"
        return last
    if kind is RequestOutputKind.CUMULATIVE:
        for before, after in itertools.pairwise(outputs):
            for ours, theirs in zip(before.outputs, after.outputs, strict=True):
                assert theirs.text.startswith(ours.text), f"{ours.text!r} became {theirs.text!r}"
                assert list(theirs.token_ids)[: len(ours.token_ids)] == list(ours.token_ids)
        return last
    told = [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]
    assert len(told) <= 1, f"prompt_logprobs came {len(told)} times"
    completions = [
        _pieces([output.outputs[place] for output in outputs]) for place in range(len(last.outputs))
    ]
    return attrs.evolve(last, outputs=completions, prompt_logprobs=told[0] if told else None)


def _pieces(pieces: Sequence[CompletionOutput]) -> CompletionOutput:
    """One completion from what each delta told of it."""
    logprobs: list[Any] = [entry for piece in pieces for entry in piece.logprobs or ()]
    return attrs.evolve(
        pieces[-1],
        text="".join(piece.text for piece in pieces),
        token_ids=[token for piece in pieces for token in piece.token_ids],
        logprobs=None if pieces[-1].logprobs is None else logprobs,
        token_sources=[source for piece in pieces for source in piece.token_sources],
    )
