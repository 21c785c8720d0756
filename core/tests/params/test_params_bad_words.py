"""bad_words: the ids of a word, what they exclude after a text, and outputs without them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from specdecode import SamplingParams
from specdecode.contract import ConfigError
from specdecode.sampling import BadWords

PROMPT = {"prompt": "abcabcabcabc"}
VOCAB = 40


def words_of(*forms: tuple[list[int], list[int]]) -> BadWords:
    """Bad words by their ids without and with a space before."""
    ids = {f"{space}{number}": form[bool(space)] for number, form in enumerate(forms) for space in ("", " ")}
    return BadWords.of(map(str, range(len(forms))), ids.__getitem__, VOCAB)


def test_a_word_of_one_token_is_banned_everywhere():
    words = words_of(([5], [6]))
    assert set(words.after([])) == set(words.after([1, 2, 5])) == {5, 6}
    assert words.reach == 0


def test_a_word_of_more_is_banned_at_its_end():
    words = words_of(([5, 6, 7], [8, 6]))
    assert words.reach == 2
    assert words.after([]) == words.after([6]) == words.after([5, 6, 1]) == ()
    assert words.after([9, 5, 6]) == (7,)
    assert words.after([8]) == (6,)


def test_a_space_of_its_own_adds_no_form():
    assert words_of(([5, 6], [3, 5, 6])) == words_of(([5, 6], [5, 6]))


def test_what_cannot_be_drawn_needs_no_ban():
    assert words_of(([5, VOCAB], [6])).after([5]) == (6,)


def test_a_word_without_tokens_is_refused():
    with pytest.raises(ConfigError, match=r"bad_words: .* no tokens for '0'"):
        words_of(([], [3]))


@settings(max_examples=200, deadline=None)
@given(
    forms=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=5),
    text=st.lists(st.integers(0, 3), max_size=8),
)
def test_the_rule_is_vllms(forms, text):
    """Its rule: the last token of a word is out where the output ends in the tokens before it."""
    words = words_of(*((form, form) for form in forms))
    want = set()
    for form in forms:
        prefix = form[:-1]
        if len(prefix) <= len(text) and text[len(text) - len(prefix) :] == prefix:
            want.add(form[-1])
    assert set(words.after(text)) == want
    assert set(words.after(text[max(0, len(text) - words.reach) :])) == want


def test_both_forms_of_a_word_are_tokenized_as_vllm_does():
    seen = []

    def encode(text: str) -> list[int]:
        seen.append(text)
        return [5]

    BadWords.of(["  word "], encode, VOCAB)
    assert seen == ["word ", " word "]


# -- through the engine ---------------------------------------------------------------------------
LETTERS = range(ord("a") + 3, ord("z") + 4)
GREEDY = SamplingParams(temperature=0, max_tokens=40, allowed_token_ids=LETTERS)


def test_no_output_holds_a_bad_word(start):
    plain, ngram = start(), start("ngram")
    (free,) = plain.generate(PROMPT, GREEDY, use_tqdm=False)
    text = free.outputs[0].text
    pair = text[5:7]
    assert text[3] not in pair
    for params in (GREEDY, GREEDY.clone(temperature=0.8, seed=3)):
        banned = params.clone(bad_words=[pair, text[3]])
        (want,) = plain.generate(PROMPT, banned, use_tqdm=False)
        (got,) = ngram.generate(PROMPT, banned, use_tqdm=False)
        assert got.outputs[0].token_ids == want.outputs[0].token_ids
        assert pair not in got.outputs[0].text and text[3] not in got.outputs[0].text


def test_words_may_begin_in_the_prompt(start):
    """As in vLLM only the output counts: a word that the prompt began may be ended."""
    llm = start()
    (free,) = llm.generate(PROMPT, GREEDY, use_tqdm=False)
    first = free.outputs[0].text[0]
    (output,) = llm.generate(PROMPT, GREEDY.clone(bad_words=["c" + first]), use_tqdm=False)
    assert output.outputs[0].text[0] == first


def test_a_tokenizer_is_wanted(start):
    llm = start(skip_tokenizer_init=True)
    with pytest.raises(ConfigError, match=r"bad_words.*tokenizer.*logit_bias"):
        llm.generate({"prompt_token_ids": [5]}, SamplingParams(bad_words=["x"]), use_tqdm=False)


def test_nothing_left_to_draw_is_an_error_of_that_request(start):
    llm = start("ngram")
    params = [
        SamplingParams(allowed_token_ids=[100, 101], bad_words=["ab"], temperature=0, max_tokens=9),
        SamplingParams(allowed_token_ids=[100], bad_words=["aa"], temperature=0, max_tokens=9),
        GREEDY,
    ]
    fine, stuck, other = (out.outputs[0] for out in llm.generate([PROMPT] * 3, params, use_tqdm=False))
    assert fine.finish_reason == other.finish_reason == "length" and fine.error is None
    assert stuck.finish_reason == "error" and "no token is left" in stuck.error
    assert stuck.token_ids == [100] and stuck.text == "a"
