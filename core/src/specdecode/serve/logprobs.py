"""Log-probabilities in the shapes of both endpoints."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from ..api.outputs import Logprob
from ..engine.detokenize import token_bytes

#: JSON has no infinity.
LOWEST = -9999.0

Row = Mapping[int, Logprob]


def chat_logprobs(
    tokenizer: Any, token_ids: Sequence[int], rows: Sequence[Row] | None, top: int
) -> dict[str, Any] | None:
    """``logprobs`` of a chat's choice; ``top``: how many likeliest tokens at each place."""
    if rows is None:
        return None
    content = []
    for token, row in zip(token_ids, rows, strict=True):
        likeliest = [
            _entry(tokenizer, id, one) for id, one in row.items() if one.rank is not None and one.rank <= top
        ]
        content.append({**_entry(tokenizer, token, row[token]), "top_logprobs": likeliest})
    return {"content": content, "refusal": None}


def _entry(tokenizer: Any, token: int, one: Logprob) -> dict[str, Any]:
    text = _text(token, one)
    return {"token": text, "logprob": _finite(one), "bytes": list(token_bytes(tokenizer, token, text))}


def _text(token: int, one: Logprob) -> str:
    return f"token_id:{token}" if one.decoded_token is None else one.decoded_token


def _finite(one: Logprob) -> float:
    return max(one.logprob, LOWEST)


@attrs.define
class CompletionLogprobs:
    """``logprobs`` of a completion's choice, whose offsets go on from piece to piece."""

    top: int
    tokenizer: Any  #: for the first token of a prompt, which has no row
    offset: int = 0  #: characters that are complete before the next token
    _decoder: codecs.IncrementalDecoder = attrs.field(
        factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )

    def take(self, token_ids: Sequence[int], rows: Sequence[Row | None]) -> dict[str, Any]:
        """Of the next tokens; None of the first one of a prompt, which nothing stands before."""
        tokens, chosen, likeliest, offsets = [], [], [], []
        for token, row in zip(token_ids, rows, strict=True):
            text = self.tokenizer.decode([token]) if row is None else _text(token, row[token])
            tokens.append(text)
            chosen.append(None if row is None else _finite(row[token]))
            tops = None if row is None else self._likeliest(token, row)
            likeliest.append(tops)
            offsets.append(self.offset)
            if self.tokenizer is not None:
                self.offset += len(self._decoder.decode(token_bytes(self.tokenizer, token, text)))
        return {
            "tokens": tokens,
            "token_logprobs": chosen,
            "top_logprobs": likeliest,
            "text_offset": offsets,
        }

    def _likeliest(self, token: int, row: Row) -> dict[str, float]:
        wanted = [
            (id, one)
            for id, one in row.items()
            if id == token or (one.rank is not None and one.rank <= self.top)
        ]
        return {_text(id, one): _finite(one) for id, one in wanted}
