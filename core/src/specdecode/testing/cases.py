"""Requests that show what each field of ``SamplingParams`` does.

Texts are those of :func:`~specdecode.testing.word_tokenizer.word_tokenizer`: token ``i`` reads ``wi``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from ..api.params import RequestOutputKind, SamplingParams
from .covering import covering_pairs
from .word_tokenizer import CHARACTERS, SPECIAL, byte_ids

VOCAB_SIZE = 300
EOS = 2

GREEDY: dict[str, Any] = {
    "temperature": 0.0,
    "max_tokens": 8,
    "ignore_eos": True,
    "output_kind": RequestOutputKind.FINAL_ONLY,
}
SEEDED = GREEDY | {"temperature": 0.5, "seed": 7}
BASES = {"greedy": GREEDY, "seeded": SEEDED}

#: Biases: special tokens now and then; a few tokens again and again; the end of sequence soon.
SPECIALS = {0: 9.0, 1: 9.0, 2: 9.0}
OFTEN = {11: 6.0, 12: 5.5, 13: 5.0}
ENDS = {EOS: 7.0}

Fields = Mapping[str, Any]
#: The output ids of a prompt under some parameters.
Decode = Callable[[Sequence[int], SamplingParams], Sequence[int]]


@attrs.frozen(eq=False)
class Case:
    """A request. ``changes`` is what it shows: with it the result is another than under ``base`` alone."""

    name: str
    prompt: tuple[int, ...]
    changes: Fields
    base: Fields

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(**{**self.base, **self.changes})

    @property
    def without(self) -> SamplingParams:
        """The same request without what it shows."""
        return SamplingParams(**self.base)

    @property
    def unstopped(self) -> SamplingParams:
        """The same tokens, going on behind where it ends: what a drafter may know."""
        on = {"stop": (), "stop_token_ids": (), "ignore_eos": True, "max_tokens": 20, "min_tokens": 0}
        return self.params.clone(**on, logprobs=None, prompt_logprobs=None)

    def with_seed(self, seed: int) -> Case:
        """The same case with other noise."""
        return attrs.evolve(self, name=f"{self.name} seed={seed}", base={**self.base, "seed": seed})


# -- logits processors -----------------------------------------------------------------------------
def seven_first(output_ids: list[int], logits: Any) -> Any:
    """Draws 7 as every third token."""
    if len(output_ids) % 3 == 1:
        logits[:] = -1e9
        logits[7] = 0.0
    return logits


def not_twice(prompt_ids: list[int], output_ids: list[int], logits: Any) -> Any:
    """No token that is in prompt or output already."""
    logits[[*prompt_ids, *output_ids]] = -100.0
    return logits


def raises_at_five(output_ids: list[int], logits: Any) -> Any:
    if len(output_ids) == 5:
        raise RuntimeError("five is enough")
    return logits


def nothing_after_four(output_ids: list[int], logits: Any) -> Any:
    return logits if len(output_ids) < 4 else logits - float("inf")


class Countdown:
    """Keeps a state: bans the token it saw drawn three calls ago."""

    def __init__(self) -> None:
        self._seen: list[int] = []

    def clone(self) -> Countdown:
        return Countdown()

    def __call__(self, output_ids: list[int], logits: Any) -> Any:
        self._seen += output_ids[-1:]
        logits[self._seen[-3:-2]] = -float("inf")
        return logits


def whole_characters(output_ids: list[int], logits: Any) -> Any:
    """Every other token begins a character of several bytes, whose bytes follow."""
    paths = [byte_ids(character, VOCAB_SIZE) for character in CHARACTERS]
    for path in paths:
        for length in range(1, len(path)):
            if output_ids[-length:] == path[:length]:
                logits[: path[length]] = logits[path[length] + 1 :] = -float("inf")
                return logits
    logits[min(map(min, paths)) :] = -float("inf")
    if not output_ids or output_ids[-1] < min(map(min, paths)):
        starts = [path[0] for path in paths]
        logits[starts] = logits[:40].topk(len(starts)).values.roll(len(output_ids)) + 0.5
    return logits


# -- one field at a time ---------------------------------------------------------------------------
def field_cases(prompts: Sequence[Sequence[int]], decode: Decode) -> list[Case]:
    """A case or more of every field, greedy and seeded, the prompts in turn; ``decode``: plain decoding.

    The last cases take all prompts together twice, to be cut to what the context holds.
    """
    cases = []
    for label, base in BASES.items():
        known = [decode(prompt, SamplingParams(**base)) for prompt in prompts]
        for number in range(len(_entries(known[0]))):
            place = number % len(prompts)
            changes, beside = _entries(known[place])[number]
            shown = ", ".join(f"{name}={_short(value)}" for name, value in changes.items())
            cases.append(Case(f"{label} {shown}", tuple(prompts[place]), changes, {**base, **beside}))
    sampled = itertools.cycle(prompts)
    cases += [
        Case(f"seeded {name}={value}", tuple(next(sampled)), {name: value}, {**SEEDED, **beside})
        for name, value, beside in SAMPLED
    ]
    long = tuple(token for prompt in prompts for token in prompt) * 2
    cases += [
        Case(f"{label} truncate_prompt_tokens=-1", long, {"truncate_prompt_tokens": -1}, base)
        for label, base in BASES.items()
    ]
    return cases


def _short(value: Any) -> str:
    if isinstance(value, list) and value and callable(value[0]):
        return "+".join(getattr(item, "__name__", type(item).__name__) for item in value)
    return getattr(value, "name", None) or repr(value)


def _words(ids: Sequence[int]) -> tuple[int, int, int]:
    """The third, fourth and fifth token whose text is a word."""
    words = [token for token in ids if len(SPECIAL) <= token < byte_ids(CHARACTERS[0], VOCAB_SIZE)[0]]
    return words[2], words[3], words[4]


def _entries(ids: Sequence[int]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """What each case changes and what it has beside; the base alone gives ``ids``."""
    third, fourth, fifth = _words(ids)
    characters = {"logits_processors": [whole_characters]}
    shown = {"skip_special_tokens": False, "logit_bias": SPECIALS}
    ends = {"ignore_eos": False, "logit_bias": ENDS}
    delta, growing = RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE
    return [
        ({"n": 3}, {}),
        ({"best_of": 2}, {"n": 2}),
        ({"presence_penalty": 1.7}, {"logit_bias": OFTEN}),
        ({"presence_penalty": -1.2}, {}),
        ({"frequency_penalty": 0.9}, {"logit_bias": OFTEN}),
        ({"repetition_penalty": 1.5}, {"logit_bias": OFTEN}),
        ({"repetition_penalty": 0.4}, {}),
        ({"stop": f"w{fifth}"}, {}),
        ({"stop": [f"w{fourth}", f"{third} w{fourth}"]}, {}),  # of two, the one that begins first
        ({"stop": ["é w", "€ w", "😀"]}, characters),
        ({"stop_token_ids": [fifth, 7]}, {"logit_bias": {7: 4.0}}),
        ({"include_stop_str_in_output": True}, {"stop": [f"w{third} "]}),
        ({"include_stop_str_in_output": True}, {"stop_token_ids": [fifth]}),
        ({"ignore_eos": False}, {"logit_bias": ENDS}),
        ({"max_tokens": 1}, {}),
        ({"max_tokens": 5}, {}),
        ({"max_tokens": None}, {}),
        ({"min_tokens": 6}, ends),
        ({"min_tokens": 6}, {"stop_token_ids": [third, fifth]}),
        ({"min_tokens": 6}, {"stop": [f"w{third}", f"w{fifth}"]}),
        ({"logprobs": 0}, {}),
        ({"logprobs": 4}, {}),
        ({"logprobs": -1}, {"max_tokens": 3}),
        ({"prompt_logprobs": 0}, {}),
        ({"prompt_logprobs": 3}, {}),
        ({"prompt_logprobs": -1}, {"truncate_prompt_tokens": 5, "max_tokens": 3}),
        ({"detokenize": False}, {}),
        ({"skip_special_tokens": False}, {"logit_bias": SPECIALS}),
        ({"spaces_between_special_tokens": False}, shown),
        ({"logit_bias": {third: -100.0, 11: 3.0}}, {}),
        ({"allowed_token_ids": [5, third, fifth, 40]}, {}),
        ({"allowed_token_ids": [EOS], "min_tokens": 3}, ends),
        ({"bad_words": [f"w{ids[1]} w{third}", f"w{fifth}"]}, {}),
        ({"bad_words": [f"w{token}" for token in (5, third)]}, {"allowed_token_ids": [5, third, fifth]}),
        ({"logits_processors": [seven_first]}, {}),
        ({"logits_processors": [not_twice, seven_first]}, {}),
        ({"logits_processors": [Countdown()]}, {"logit_bias": OFTEN}),
        ({"logits_processors": [whole_characters]}, {}),
        ({"logits_processors": [raises_at_five]}, {}),
        ({"logits_processors": [nothing_after_four]}, {}),
        ({"truncate_prompt_tokens": 6}, {}),
        ({"speculation": 2}, {}),
        ({"speculation": False}, {}),
        ({"output_kind": delta}, {"stop": [f"w{fifth}"], "logprobs": 2, "prompt_logprobs": 1}),
        ({"output_kind": growing}, {"n": 2, "logprobs": 1}),
        ({"output_kind": delta}, {"n": 2, **characters}),
    ]


#: Fields that matter only where there is chance: name, value, and what is beside it.
SAMPLED: tuple[tuple[str, Any, dict[str, Any]], ...] = (
    ("temperature", 1.6, {}),
    ("temperature", 0.0, {}),
    ("top_p", 0.3, {}),
    ("top_p", 0.7, {"temperature": 1.3}),
    ("top_k", 2, {}),
    ("top_k", 20, {"temperature": 1.3}),
    ("min_p", 0.5, {}),
    ("min_p", 0.05, {"temperature": 1.3}),
    ("seed", 2**40, {}),
    ("seed", -3, {}),
    ("seed", 2**64 + 8, {}),
)

#: Fields without a case, and why.
LEFT_OUT = {
    "structured_outputs": "a grammar wants a tokenizer that can spell any text: see tests/structured",
    "guided_decoding": "the old spelling of structured_outputs",
}

#: Cases whose results are those of the base: the field does something else, or what it says anyway.
WITHOUT_EFFECT = frozenset({"best_of", "speculation", "output_kind"})


# -- all pairs of values ---------------------------------------------------------------------------
def pair_cases(prompts: Sequence[Sequence[int]], decode: Decode, seed: int = 0) -> Iterator[Case]:
    """Few cases in which every two values of two fields meet."""
    base = GREEDY | {"seed": 7, "min_tokens": 0}
    known = [decode(prompt, SamplingParams(**base)) for prompt in prompts]
    factors = _factors(known[0])
    for number, row in enumerate(covering_pairs(factors, seed)):
        place = number % len(prompts)
        values = _factors(known[place])
        changes: dict[str, Any] = {}
        for name, choice in row.items():
            changes |= values[name][choice]
        yield Case(f"pairs {seed}.{number}", tuple(prompts[place]), changes, base)


def _factors(ids: Sequence[int]) -> dict[str, list[dict[str, Any]]]:
    """Fields that exclude each other are one factor."""
    third, _, fifth = _words(ids)
    kinds = RequestOutputKind
    return {
        "temperature": [{"temperature": t} for t in (0.0, 0.6, 1.3)],
        "top_p": [{}, {"top_p": 0.8}],
        "top_k": [{}, {"top_k": 30}],
        "min_p": [{}, {"min_p": 0.02}],
        "presence_penalty": [{}, {"presence_penalty": 0.8}],
        "frequency_penalty": [{}, {"frequency_penalty": 0.6}],
        "repetition_penalty": [{}, {"repetition_penalty": 1.3}],
        "text": [
            {},
            {"detokenize": False},
            {"skip_special_tokens": False},
            {"skip_special_tokens": False, "spaces_between_special_tokens": False},
            {"stop": [f"w{fifth}", f"w{third} "]},
            {"stop": [f"w{fifth}", f"w{third} "], "include_stop_str_in_output": True},
        ],
        "stop_token_ids": [{}, {"stop_token_ids": [fifth]}],
        "ignore_eos": [{}, {"ignore_eos": False}],
        "length": [{}, {"max_tokens": 5}, {"max_tokens": 12, "min_tokens": 7}],
        "logprobs": [{}, {"logprobs": 0}, {"logprobs": 3}],
        "prompt_logprobs": [{}, {"prompt_logprobs": 2}],
        "logit_bias": [{}, {"logit_bias": {EOS: 5.0, 11: 3.0, third: -2.0}}],
        "allowed_token_ids": [{}, {"allowed_token_ids": [EOS, 7, 11, third, fifth, *range(20, 80)]}],
        "bad_words": [{}, {"bad_words": [f"w{third}", f"w{fifth} w{third}"]}],
        "logits_processors": [{}, {"logits_processors": [seven_first]}],
        "truncate_prompt_tokens": [{}, {"truncate_prompt_tokens": 9}, {"truncate_prompt_tokens": 4096}],
        "speculation": [{}, {"speculation": 1}, {"speculation": False}],
        "n": [{}, {"n": 2}],
        "output_kind": [{"output_kind": kind} for kind in (kinds.FINAL_ONLY, kinds.DELTA, kinds.CUMULATIVE)],
    }
