"""The reference decoder: everything a user is given, recomputed from the whole sequence for each token.

No cache, no batch, no drafts, no incremental text; its sampling is written out anew. What the
engine gives must equal it, whatever method, batch or memory the engine has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import attrs
import torch

from ..api.outputs import CompletionOutput, Logprob, RequestOutput
from ..api.params import SamplingParams
from ..models import Decoder
from .dense import DenseRow, dense_forward
from .plain_sampling import Draw, NoToken, next_token
from .stateless import DenseSource, DenseStep, StatelessDrafter

__all__ = [
    "DenseRow",
    "DenseSource",
    "DenseStep",
    "ReferenceDecoder",
    "StatelessDrafter",
    "dense_forward",
    "reference_decode",
]

#: A token id -> its log-probability; the token it is about comes first.
TokenLogprobs = dict[int, Logprob]
#: The output so far -> the ids that a grammar allows next; none of them if the output is complete.
Grammar = Callable[[Sequence[int]], Collection[int]]

_REPLACEMENT = "\ufffd"


def signed_seed(seed: int) -> int:
    """A user's seed, taken modulo 2**64, as the signed integer that keys the noise."""
    word = seed % 2**64
    return word - 2**64 if word >= 2**63 else word


@attrs.frozen(kw_only=True)
class _Finish:
    reason: str
    stop: int | str | None = None
    error: str | None = None
    by_token: bool = False  #: by its last token, which is no part of the text


class ReferenceDecoder:
    """Decodes one request at a time.

    Args:
        model: the target.
        tokenizer: for text, stop strings, bad words; None: there is no text.
        eos_ids: end an output unless ``ignore_eos``.
        max_model_len: most tokens, prompt included; None: the model's.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: Any = None,
        *,
        eos_ids: Collection[int] = (),
        max_model_len: int | None = None,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._eos_ids = frozenset(eos_ids)
        self._longest = max_model_len or model.max_model_len
        self._logits: dict[tuple[int, ...], torch.Tensor] = {}

    def request(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, grammar: Grammar | None = None
    ) -> RequestOutput:
        """What the engine must give at the end of a request.

        Args:
            grammar: what ``params.structured_outputs`` means, worked out by the caller.

        Raises:
            ValueError: ``params`` asks for something that depends on more than prompt and seed.
        """
        if not params.greedy and params.seed in (None, -1):
            raise ValueError(f"a sampled request wants a seed to be repeated, got seed={params.seed!r}")
        if (params.structure is not None) != (grammar is not None):
            raise ValueError("structured_outputs and grammar must come together")
        keep = params.truncate_prompt_tokens
        prompt = list(prompt_ids)
        if keep is not None:
            prompt = prompt[-(self._longest - 1 if keep == -1 else keep) :]
        seed = signed_seed(params.seed or 0)
        outputs = [self.completion(prompt, params, seed, index, grammar) for index in range(params.n)]
        scores = None if params.prompt_logprobs is None else self._prompt(prompt, params.prompt_logprobs)
        return RequestOutput(
            request_id="reference",
            prompt=None,
            prompt_token_ids=prompt,
            outputs=outputs,
            finished=True,
            prompt_logprobs=scores,
        )

    @torch.inference_mode()
    def completion(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        seed: int = 0,
        index: int = 0,
        grammar: Grammar | None = None,
    ) -> CompletionOutput:
        """Completion ``index`` of a prompt, with the noise of ``seed``; nothing of the prompt is cut off."""
        if (params.stop or params.bad_words) and self._tokenizer is None:
            raise ValueError(f"stop strings and bad words want a tokenizer, got {params!r}")
        eos_ids = frozenset() if params.ignore_eos else self._eos_ids
        words = self._forms(params.bad_words or ())
        processors = [
            processor.clone() if hasattr(processor, "clone") else processor
            for processor in params.logits_processors or ()
        ]
        output: list[int] = []
        scores: list[TokenLogprobs] = []
        text, finish = "", None
        while finish is None:
            logits = self.next_logits([*prompt_ids, *output])
            draw = Draw(
                params=params,
                prompt_ids=prompt_ids,
                output_ids=output,
                seed=seed,
                index=index,
                eos_ids=eos_ids,
                bad_words=words,
                processors=processors,
                allowed=None if grammar is None else grammar(output),
            )
            try:
                output.append(next_token(logits, draw))
            except NoToken as error:
                finish = _Finish(reason="error", error=str(error))
                text = self._text(prompt_ids, output, params)
                break
            if params.logprobs is not None:
                scores.append(self._scores(logits, output[-1], params.logprobs))
            finish = self._ends(prompt_ids, output, params, eos_ids)
            if grammar is not None and not (finish and finish.by_token) and not grammar(output):
                finish = _Finish(reason="stop")
            text, finish = self._read(prompt_ids, output, params, text, finish)
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=output,
            cumulative_logprob=None
            if params.logprobs is None
            else math.fsum(score[token].logprob for score, token in zip(scores, output, strict=True)),
            logprobs=None if params.logprobs is None else scores,
            finish_reason=finish.reason,  # type: ignore[arg-type]
            stop_reason=finish.stop,
            error=finish.error,
        )

    def next_logits(self, ids: Sequence[int]) -> torch.Tensor:
        """``[V]`` after ``ids``, computed densely; the same ids are computed once."""
        key = tuple(ids)
        if key not in self._logits:
            hidden, _ = dense_forward(self._model, ids)
            self._logits[key] = self._model.compute_logits(hidden[-1:])[0]
        return self._logits[key]

    # -- where it ends --------------------------------------------------------------------------
    def _ends(
        self, prompt_ids: Sequence[int], output: Sequence[int], params: SamplingParams, eos: Collection[int]
    ) -> _Finish | None:
        """By a token or by the length."""
        if len(output) >= params.min_tokens:
            if output[-1] in params.stop_token_ids:
                return _Finish(reason="stop", stop=output[-1], by_token=True)
            if output[-1] in eos:
                return _Finish(reason="stop", by_token=True)
        full = len(prompt_ids) + len(output) >= self._longest
        return _Finish(reason="length") if full or len(output) == params.max_tokens else None

    def _read(
        self,
        prompt_ids: Sequence[int],
        output: Sequence[int],
        params: SamplingParams,
        before: str,
        finish: _Finish | None,
    ) -> tuple[str, _Finish | None]:
        """The text of ``output``, and how it ends if a stop string has come; ``before``: the text so far."""
        if finish and finish.by_token and not params.include_stop_str_in_output:
            return self._text(prompt_ids, output[:-1], params), finish
        text = self._text(prompt_ids, output, params)
        if finish is None and text.endswith(_REPLACEMENT):
            return before, None  # a character that may still be completed
        if len(output) <= params.min_tokens:
            return text, finish
        found = [
            (start, stop)
            for stop in params.stop
            if (start := text.find(stop, max(0, len(before) - len(stop) + 1))) >= 0
        ]
        if not found:
            return text, finish
        start, stop = min(found, key=lambda place: place[0])
        end = start + len(stop) if params.include_stop_str_in_output else start
        return text[:end], _Finish(reason="stop", stop=stop)

    # -- text -----------------------------------------------------------------------------------
    def _text(self, prompt_ids: Sequence[int], output: Sequence[int], params: SamplingParams) -> str:
        """What ``output`` adds to the text of the prompt."""
        if self._tokenizer is None or not params.detokenize:
            return ""
        prompt, whole = self._decode(prompt_ids, params), self._decode([*prompt_ids, *output], params)
        return whole[len(prompt) :]

    def _decode(self, ids: Sequence[int], params: SamplingParams) -> str:
        pieces: list[list[int]] = [[]]
        special = set(self._tokenizer.all_special_ids)
        apart = not (params.spaces_between_special_tokens or params.skip_special_tokens)
        for token in ids:
            if apart and token in special and pieces[-1] and pieces[-1][-1] in special:
                pieces.append([])
            pieces[-1].append(token)
        skip = params.skip_special_tokens
        return "".join(self._tokenizer.decode(piece, skip_special_tokens=skip) for piece in pieces)

    def _forms(self, words: Sequence[str]) -> list[list[int]]:
        """Token ids of each word as it stands and behind a space."""
        spellings = [spelling for word in words for spelling in (word.lstrip(), " " + word.lstrip())]
        return [self._tokenizer.encode(spelling, add_special_tokens=False) for spelling in spellings]

    # -- log-probabilities ----------------------------------------------------------------------
    @torch.inference_mode()
    def _prompt(self, prompt_ids: Sequence[int], num: int) -> list[TokenLogprobs | None]:
        hidden, _ = dense_forward(self._model, prompt_ids)
        rows = self._model.compute_logits(hidden[:-1])
        scores = (self._scores(row, token, num) for row, token in zip(rows, prompt_ids[1:], strict=True))
        return [None, *scores]

    def _scores(self, logits: torch.Tensor, chosen: int, num: int) -> TokenLogprobs:
        """Of ``chosen`` and of the ``num`` likeliest (-1: all), from untransformed ``logits`` ``[V]``."""
        values = logits.double().log_softmax(-1).tolist()
        # Equal logits share a rank; the lowest id comes first.
        ranked = sorted(range(len(values)), key=lambda token: (-values[token], token))
        tokens = dict.fromkeys([chosen, *ranked[: len(values) if num < 0 else num]])
        ordered = sorted(values, reverse=True)
        return {
            token: Logprob(
                values[token],
                1 + ordered.index(values[token]),
                None if self._tokenizer is None else self._tokenizer.decode([token]),
            )
            for token in tokens
        }


def reference_decode(
    model: Decoder,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    *,
    seed: int = 0,
    index: int = 0,
    eos_ids: Collection[int] = (),
    max_model_len: int | None = None,
) -> list[int]:
    """The output ids of a prompt, each drawn from a forward over everything before it.

    Args:
        seed: keys the noise of a sampled request; what ``resolve_seed`` makes of ``params.seed``.
        index: which completion of the prompt.
        eos_ids: end the output unless ``params.ignore_eos``.
        max_model_len: most tokens, prompt included; None: the model's.

    Raises:
        ValueError: ``params`` has stop strings or bad words, which want a tokenizer.
    """
    decoder = ReferenceDecoder(model, eos_ids=eos_ids, max_model_len=max_model_len)
    return list(decoder.completion(prompt_ids, params, seed, index).token_ids)
