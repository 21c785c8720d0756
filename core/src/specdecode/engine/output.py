"""The visible side of a request: its tokens, text and logprobs, cut where it stops."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Literal

import attrs

from ..sampling.logprobs import RowLogprobs
from .detokenize import Detokenizer
from .request import Request
from .stop import Finish, find_stop, open_stop, stop_at_token

logger = logging.getLogger(__name__)

TokenSource = Literal["draft", "target"]


@attrs.frozen(eq=False)
class DrawnTokens:
    """What one verification gave a row, in order: accepted drafts and one token of the target's own.

    With ``error`` that last token is missing and the request ends.
    """

    ids: Sequence[int]
    accepted: int
    logprobs: Sequence[RowLogprobs] | None = None
    error: str | None = None  #: why there is no token of the target's own

    def source(self, position: int) -> TokenSource:
        return "draft" if position < self.accepted else "target"


@attrs.define(eq=False)
class RequestOutputState:
    """Grows token by token and says when to stop."""

    request: Request
    detokenizer: Detokenizer | None
    token_ids: list[int] = attrs.field(factory=list)
    sources: list[TokenSource] = attrs.field(factory=list)
    logprobs: list[RowLogprobs] = attrs.field(factory=list)
    prompt_logprobs: list[RowLogprobs] = attrs.field(factory=list)  #: of the prompt's tokens after the first
    finish: Finish | None = None
    error: str | None = None  #: what went wrong, if that ended it
    _stop_ids: frozenset[int] = attrs.Factory(
        lambda self: frozenset(self.request.params.stop_token_ids), takes_self=True
    )
    _searched: int = 0  #: characters of the text among which no stop string ends

    @classmethod
    def create(cls, request: Request, tokenizer: Any) -> RequestOutputState:
        params = request.params
        detokenizer = None
        if tokenizer is not None and params.detokenize:
            detokenizer = Detokenizer(
                tokenizer,
                request.prompt_ids,
                skip_special_tokens=params.skip_special_tokens,
                spaces=params.spaces_between_special_tokens,
            )
        return cls(request, detokenizer)

    @property
    def text(self) -> str:
        return self.detokenizer.text if self.detokenizer else ""

    @property
    def settled_text(self) -> str:
        """Text that no later token can take back: until the end, without what may begin a stop string."""
        params = self.request.params
        if self.finish or not params.stop or params.include_stop_str_in_output:
            return self.text
        return self.text[: len(self.text) - open_stop(self.text, params.stop)]

    def append(self, drawn: DrawnTokens) -> int:
        """Take tokens up to the one that ends the request; returns how many."""
        for position, token in enumerate(drawn.ids):
            self.token_ids.append(token)
            self.sources.append(drawn.source(position))
            if drawn.logprobs is not None:
                self.logprobs.append(drawn.logprobs[position])
            try:
                self.finish = self._check(token)
            except Exception as error:  # the tokenizer's, which may be anybody's
                what = f"{type(error).__name__}: {error}"
                message = f"turning token {token} of the output into text raised {what}"
                logger.warning("request %s ends: %s", self.request.id, message, exc_info=error)
                self.end("error", message)
            if self.finish:
                return position + 1
        if drawn.error is not None:
            self.end("error", drawn.error)
        return len(drawn.ids)

    def end(self, reason: str, error: str | None = None) -> None:
        """End it from outside, for example by an abort."""
        if self.finish is None:
            self.finish, self.error = Finish(reason), error
            if self.detokenizer:
                self.detokenizer.flush()

    def _check(self, token: int) -> Finish | None:
        request, params = self.request, self.request.params
        num_output = len(self.token_ids)
        finish = stopped = stop_at_token(
            token,
            num_output,
            min_tokens=params.min_tokens,
            eos_ids=request.eos_ids,
            stop_ids=self._stop_ids,
        )
        if finish is None and request.grammar is not None and request.grammar.end == num_output:
            finish = Finish("stop")
        if finish is None and len(request.prompt_ids) + num_output >= request.limit:
            finish = Finish("length")
        if self.detokenizer is None:
            return finish
        if stopped and not params.include_stop_str_in_output:
            self.detokenizer.flush()  # the text of the stop token itself stays out
            return finish
        self.detokenizer.append(token)
        if finish:
            self.detokenizer.flush()
        return self._stop_in_text() or finish

    def _stop_in_text(self) -> Finish | None:
        """Cut the text at a stop string that the last token completed."""
        params, detokenizer = self.request.params, self.detokenizer
        if not params.stop or detokenizer is None:
            return None
        text = detokenizer.legible
        if len(self.token_ids) <= params.min_tokens:
            self._searched = len(text)
            return None
        found = find_stop(text, len(text) - self._searched, params.stop)
        # What is pending may read otherwise after the next token.
        self._searched = max(self._searched, len(detokenizer.text))
        if found is None:
            return None
        detokenizer.cut(found.end if params.include_stop_str_in_output else found.start)
        return Finish("stop", found.string)
