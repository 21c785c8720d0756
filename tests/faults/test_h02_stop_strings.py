"""H02: a stop string inside an accepted block ends text, ids and log-probabilities at one place.

The target loops through an alphabet, so that an oracle, ngram and self-draft are always right with
k=16, and every pair of letters is a stop at a known offset. (Suffix decoding: `plugins/suffix/tests`.)
"""

from __future__ import annotations

from typing import Any

import attrs
import pytest

K = 16
ALPHABET = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMN"
LETTERS = [3 + byte for byte in ALPHABET]  # ids of a tiny checkpoint are byte + 3
TEXT = ALPHABET.decode()
PROMPT = LETTERS * 2  # so that ngram finds its longest window and drafts in full length


@pytest.fixture(scope="module")
def loop(fault_lab):
    """Greedy output goes round the alphabet, from ``a`` on behind a prompt that ends with the last letter."""
    from specdecode.testing.tiny import favour

    return fault_lab.table(favour(dict(zip(LETTERS, [*LETTERS[1:], LETTERS[0]], strict=True))))


def _engine(faults, loop, drafter, late=False):
    """The drafter knows the loop; the prompt of each request is two whole rounds of it."""
    config = faults.drafter(drafter, [PROMPT * 2], K)
    return faults.engine(config, model=loop, async_scheduling=late)


def _ask(faults, stop, **params):
    return faults.ask(PROMPT, **({"max_tokens": 2 * K + 6, "stop": stop, "logprobs": 1} | params))


def _check(faults, same, loop, engine, asks):
    outputs = engine.generate(asks)
    same(outputs, faults.base(asks, model=loop))
    for output in outputs:
        (completion,) = output.outputs
        assert len(completion.token_ids) == len(completion.logprobs) == len(completion.token_sources)
    return [output.outputs[0] for output in outputs]


def _sources(k=K):
    """An oracle's: a token from the prompt, then blocks of k drafts and a bonus token."""
    return ["target", *(["draft"] * k + ["target"]) * 3]


@pytest.mark.parametrize(
    ("drafter", "late"),
    [
        ("oracle", False),
        ("oracle", True),
        ("ngram", False),
        ("ngram", True),
        ("self-draft", False),
        ("spoiled", False),
        ("ragged", True),
        ("oracle-tree", False),
    ],
)
def test_h02_stop_string_at_every_offset(faults, same, loop, drafter, late):
    """Pairs that begin in the prompt's own token, at each offset, and across two blocks; cut and kept."""
    engine = _engine(faults, loop, drafter, late)
    places = range(K + 3)
    asks = [
        _ask(faults, [TEXT[place : place + 2]], include_stop_str_in_output=kept)
        for place in places
        for kept in (False, True)
    ]
    completions = iter(_check(faults, same, loop, engine, asks))
    for place in places:
        for end in (place, place + 2):
            completion = next(completions)
            assert (completion.text, completion.finish_reason) == (TEXT[:end], "stop")
            assert completion.stop_reason == TEXT[place : place + 2]
            assert list(completion.token_ids) == LETTERS[: place + 2]
            if drafter in ("oracle", "ngram", "self-draft"):
                assert completion.token_sources == _sources()[: place + 2]


@attrs.frozen
class Case:
    """What ``params`` make of the loop's text."""

    params: dict[str, Any]
    text: str
    reason: Any  #: the stop string, or None where the length ended it


LONG = TEXT[2 : K + 6]
CASES = [
    # Of two stops in one block the one that comes first wins, whatever their order.
    Case({"stop": ["ij", "cd"]}, "ab", "cd"),
    Case({"stop": ["cd", "ij"]}, "ab", "cd"),
    Case({"stop": ["cd", "ij"], "include_stop_str_in_output": True}, "abcd", "cd"),
    Case({"stop": ["cde", "de"]}, "ab", "cde"),
    Case({"stop": ["xyz", "bcd"], "include_stop_str_in_output": True}, "abcd", "bcd"),
    # One that begins more than a step, and more than a block, before its end.
    Case({"stop": [LONG]}, "ab", LONG),
    # Those that lie in the prompt, or begin in it, do not fire.
    Case({"stop": [TEXT[30:32]], "max_tokens": 20}, TEXT[:20], None),
    Case({"stop": [TEXT[-1] + TEXT[0]], "max_tokens": 20}, TEXT[:20], None),
    # A neighbour without stops, and one whose stop comes too early to count.
    Case({"stop": []}, TEXT[: 2 * K + 6], None),
    Case({"stop": ["fg"], "min_tokens": 8}, TEXT[: 2 * K + 6], None),
]


def test_h02_two_stops_long_stops_and_those_of_the_prompt(faults, same, loop, drafter):
    engine = _engine(faults, loop, drafter)
    asks = [faults.ask(PROMPT, **({"max_tokens": 2 * K + 6, "logprobs": 1} | case.params)) for case in CASES]
    for case, completion in zip(CASES, _check(faults, same, loop, engine, asks), strict=True):
        assert (completion.text, completion.stop_reason) == (case.text, case.reason)
        assert completion.finish_reason == ("stop" if case.reason else "length")
