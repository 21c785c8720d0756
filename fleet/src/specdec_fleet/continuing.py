"""Answers that go on from one replica to the next: what a reader was given is not given again.

A replica that takes a request over computes it from its beginning. The same seed gives the same tokens,
so what it gives first is what the reader has, and is held back after a comparison. Pure: no Ray here.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
from specdecode import CompletionOutput, RequestOutput
from specdecode.api.params import RequestOutputKind

from .errors import RequestLostError


@attrs.define
class _Completion:
    """One completion: what the reader has of it, and how far the replica at work has come."""

    token_ids: list[int] = attrs.field(factory=list)  #: given to the reader
    num_chars: int = 0  #: given to the reader
    finished: bool = False  #: the reader knows that it has ended
    tokens_seen: int = 0  #: from the replica at work
    chars_seen: int = 0


class Continuation:
    """Turns the outputs of one attempt after the other into those of one request.

    Args:
        kind: of the outputs: under ``DELTA`` each brings what is new, else all there is.
    """

    def __init__(self, kind: RequestOutputKind) -> None:
        self._kind = kind
        self._completions: dict[int, _Completion] = {}
        self._told_prompt = False  # its log-probabilities, which come once under DELTA

    @property
    def num_tokens(self) -> int:
        """Tokens that the reader has, of all completions."""
        return sum(len(one.token_ids) for one in self._completions.values())

    def begin_again(self) -> None:
        """A new attempt: its outputs begin with the request's first token."""
        for one in self._completions.values():
            one.tokens_seen = one.chars_seen = 0

    def take(self, output: RequestOutput) -> RequestOutput | None:
        """What of an attempt's next output is new to the reader; None: nothing.

        Raises:
            RequestLostError: the tokens are not those that the reader has.
        """
        if self._kind is RequestOutputKind.DELTA:
            return self._new(output)
        return output if self._goes_on(output) else None

    # -- everything so far ----------------------------------------------------------------------
    def _goes_on(self, output: RequestOutput) -> bool:
        shorter = False
        for completion in output.outputs:
            known = self._completions.setdefault(completion.index, _Completion())
            given, now = known.token_ids, list(completion.token_ids)
            self._compare(given[: len(now)], now[: len(given)])
            shorter |= len(now) < len(given) or (known.finished and not completion.finished())
        if shorter:
            return False
        for completion in output.outputs:
            known = self._completions[completion.index]
            known.token_ids, known.finished = list(completion.token_ids), completion.finished()
        return True

    # -- what is new ----------------------------------------------------------------------------
    def _new(self, output: RequestOutput) -> RequestOutput | None:
        pairs = [self._rest(completion) for completion in output.outputs]
        prompt_logprobs = None if self._told_prompt else output.prompt_logprobs
        self._told_prompt |= prompt_logprobs is not None
        if not output.finished and prompt_logprobs is None and not any(new for _, new in pairs):
            return None
        outputs = [completion for completion, _ in pairs]
        return attrs.evolve(output, outputs=outputs, prompt_logprobs=prompt_logprobs)

    def _rest(self, completion: CompletionOutput) -> tuple[CompletionOutput, bool]:
        """What the reader does not have of a completion's next piece, and whether that is anything."""
        known = self._completions.setdefault(completion.index, _Completion())
        tokens, text = list(completion.token_ids), completion.text
        old_tokens = max(0, min(len(tokens), len(known.token_ids) - known.tokens_seen))
        old_chars = max(0, min(len(text), known.num_chars - known.chars_seen))
        first = known.tokens_seen
        self._compare(known.token_ids[first : first + old_tokens], tokens[:old_tokens])
        known.tokens_seen += len(tokens)
        known.chars_seen += len(text)
        ends = completion.finished() and not known.finished
        if not old_tokens and not old_chars:
            rest = completion
        else:
            rest = attrs.evolve(
                completion,
                text=text[old_chars:],
                token_ids=tokens[old_tokens:],
                logprobs=None if completion.logprobs is None else completion.logprobs[old_tokens:],
                token_sources=completion.token_sources[old_tokens:],
            )
        known.token_ids += tokens[old_tokens:]
        known.num_chars += len(text) - old_chars
        known.finished |= completion.finished()
        return rest, bool(rest.token_ids or rest.text or ends)

    @staticmethod
    def _compare(given: Sequence[int], now: Sequence[int]) -> None:
        if list(given) != list(now):
            raise RequestLostError(
                "a replica was lost and the one that took the request over gives other tokens than those "
                "already sent: it cannot go on. Replicas of one fleet need the same hardware and dtype, and "
                "the default rule of verification"
            )
