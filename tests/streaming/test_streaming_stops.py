"""Stop strings in a stream: found wherever they lie, none of their characters sent, the rest not kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

REPLACEMENT = "\ufffd"
OF_BYTES = ("byte-level", "byte-fallback", "byte-fallback-bare")
PROMPT = [261]

of_bytes = pytest.mark.parametrize("name", OF_BYTES)
in_steps_of = pytest.mark.parametrize("size", range(1, 8))


def bytes_of(text: str) -> list[int]:
    return [5 + byte for byte in text.encode()]


def prefixes(tokenizer: Any, whole: Any, ids: Sequence[int], in_runs: bool) -> list[str]:
    """For each number of tokens the text, but for a character or run of bytes that is not complete."""
    texts = [""]
    for count, token in enumerate(ids, 1):
        text = whole(tokenizer, PROMPT, ids[:count])
        start = count
        while in_runs and start and 5 <= ids[start - 1] < 261:
            start -= 1
        run = text[len(whole(tokenizer, PROMPT, ids[:start])) :]
        complete = REPLACEMENT not in run if in_runs and 5 <= token < 261 else not text.endswith(REPLACEMENT)
        texts.append(text if complete else text.removesuffix(run or REPLACEMENT))
    return texts


def expected(texts: Sequence[str], stops: Sequence[str], min_tokens: int) -> tuple[int, str, str] | None:
    """Tokens, text before the stop and the stop, by looking at the whole text after each token."""
    for count in range(min_tokens + 1, len(texts)):
        found = [
            (start, place)
            for place, stop in enumerate(stops)
            for start in range(len(texts[count]))
            if texts[count].startswith(stop, start) and start + len(stop) > len(texts[min_tokens])
        ]
        if found:
            start, place = min(found)
            return count, texts[count][:start], stops[place]
    return None


# -- at every place -------------------------------------------------------------------------------
@of_bytes
@in_steps_of
@pytest.mark.parametrize("stop", ["STOP", "世🙂", "é"])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_over_tokens_and_steps(forced, name, size, stop, include):
    """With each size of a step the stop begins and ends at other places of a draft."""
    text = f"one 世 {stop} two"
    end = text.index(stop) + len(stop)
    want = text[: end if include else end - len(stop)]
    streams = forced(name).run(PROMPT, bytes_of(text), [size], stop=stop, include_stop_str_in_output=include)
    final = streams.agreed()
    assert (final.text, final.finish_reason, final.stop_reason) == (want, "stop", stop)
    assert list(final.token_ids) == bytes_of(text[:end])
    assert all(want.startswith(sent) for sent in streams.sent)


@of_bytes
@in_steps_of
def test_what_only_begins_like_a_stop_is_sent_as_soon_as_that_is_plain(forced, name, size):
    text = "a STO b STOS STOP"
    streams = forced(name).run(PROMPT, bytes_of(text), [size], stop=["STOP", "b S!"])
    assert streams.agreed().text == "a STO b STOS "
    if name == "byte-level":
        held = {"STO": 3, "ST": 2, "S": 1, "b STO": 3, "b ST": 2, "b S": 3, "b ": 2, "b": 1}
        done = 0
        for count, sent in zip(streams.sizes[:-1], streams.sent, strict=False):
            done += count
            tails = [tail for tail in held if text[:done].endswith(tail)]
            assert sent == text[: done - (held[max(tails, key=len)] if tails else 0)]


@of_bytes
@in_steps_of
def test_held_back_text_is_released_at_the_end(forced, name, size):
    """By length, and by a stop token, whose own text stays out."""
    ids = bytes_of("is it a STO")
    streams = forced(name).run(PROMPT, ids, [size], stop="STOP")
    assert (streams.agreed().text, streams.sent[-1]) == ("is it a STO", "is it a STO")
    streams = forced(name).run(
        PROMPT, [*ids, *bytes_of("x")], [size], stop="STOP", stop_token_ids=bytes_of("x")
    )
    final = streams.agreed()
    assert (final.text, final.finish_reason, final.stop_reason) == ("is it a STO", "stop", bytes_of("x")[0])


@of_bytes
@in_steps_of
def test_a_stop_in_the_prompt_or_over_its_end_is_none(forced, name, size):
    streams = forced(name).run([261, *bytes_of("xSTOP ST")], bytes_of("OP go"), [size], stop="STOP")
    final = streams.agreed()
    assert (final.text, final.finish_reason) == ("OP go", "length")


@of_bytes
@in_steps_of
def test_a_stop_token_that_completes_a_stop_string(forced, name, size):
    """Its text counts where it is shown."""
    ids = bytes_of("go STOP")
    fields = {"stop": "STOP", "stop_token_ids": bytes_of("P")}
    final = forced(name).run(PROMPT, ids, [size], **fields).agreed()
    assert (final.text, final.stop_reason) == ("go STO", bytes_of("P")[0])
    final = forced(name).run(PROMPT, ids, [size], include_stop_str_in_output=True, **fields).agreed()
    assert (final.text, final.stop_reason) == ("go STOP", "STOP")


@of_bytes
@pytest.mark.parametrize("size", [1, 3, 7])
@pytest.mark.parametrize("minimum", range(12))
def test_min_tokens(forced, name, size, minimum):
    """A stop counts if it is completed by a later token than the ``min_tokens``-th."""
    text = "ab ab ab ab!"
    engine = forced(name)
    ends = [end for end in (2, 5, 8, 11) if end > minimum]
    streams = engine.run(PROMPT, bytes_of(text), [size], stop="ab", min_tokens=minimum)
    final = streams.agreed()
    want = text[: ends[0] - 2] if ends else text
    assert final.text == want and len(final.token_ids) == (ends[0] if ends else len(text))
    assert final.finish_reason == ("stop" if ends else "length")
    assert all(want.startswith(sent) for sent in streams.sent)


# -- any stops in any text ------------------------------------------------------------------------
#: Ids 261 to 268 are tokens of more than a byte, some of which begin or end inside a character.
pieces = st.lists(
    st.one_of(
        st.sampled_from("aé世🙂 bst").map(bytes_of),
        st.sampled_from(["sto", "stop", "世世", "aé"]).map(bytes_of),
        st.integers(261, 268).map(lambda token: [token]),
    ),
    min_size=1,
    max_size=16,
).map(lambda groups: [token for group in groups for token in group][:48])


@of_bytes
@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    data=st.data(),
    ids=pieces,
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=5),
    include=st.booleans(),
)
def test_any_stops(forced, whole, name, data, ids, sizes, include):
    engine = forced(name)
    texts = prefixes(engine.tokenizer, whole, ids, name != "byte-level")
    text, end = whole(engine.tokenizer, PROMPT, ids), len(texts[-1])
    spans = st.tuples(st.integers(0, max(0, end - 1)), st.integers(1, 5)).map(
        lambda s: texts[-1][s[0] : sum(s)]
    )
    stops = data.draw(st.lists(st.one_of(spans, st.sampled_from(["stop", "世a", "🙂 ", "!"])), max_size=3))
    stops = [stop for stop in stops if stop]
    minimum = data.draw(st.sampled_from([0, 0, 1, 5, len(ids)]).filter(lambda least: least <= len(ids)))
    fields = {"stop": stops, "min_tokens": minimum, "include_stop_str_in_output": include}
    streams = engine.run(PROMPT, ids, sizes, **fields)
    final, want = streams.agreed(), expected(texts, stops, minimum)
    if want is None:
        assert (final.text, final.finish_reason, list(final.token_ids)) == (text, "length", ids)
    else:
        count, before, stop = want
        assert (final.finish_reason, final.stop_reason) == ("stop", stop)
        assert final.text == before + (stop if include else "")
        assert list(final.token_ids) == ids[:count]
    assert all(final.text.startswith(sent) for sent in streams.sent)


@of_bytes
@pytest.mark.parametrize("size", [1, 3, 7])
def test_a_stop_in_a_text_that_a_later_token_changed(forced, whole, name, size):
    """A run that was readable is decoded as U+FFFD throughout, and that is the stop."""
    engine, ids = forced(name), [*bytes_of("世"), 5 + 0xFF, 263, 264]
    final = engine.run(PROMPT, ids, [size], stop=REPLACEMENT).agreed()
    assert final.text == whole(engine.tokenizer, PROMPT, ids).split(REPLACEMENT)[0]
    assert (final.finish_reason, final.stop_reason) == ("stop", REPLACEMENT)


def test_what_may_begin_a_stop():
    from specdecode.engine.stop import open_stop

    assert open_stop("one ST", ["STOP"]) == 2
    assert open_stop("one STOP", ["STOP"]) == 0  # a whole one is found, not waited for
    assert open_stop("aab", ["ab", "aabc"]) == 3
    assert open_stop("xa", ["ab", "aabc"]) == 1
    assert open_stop("", ["ab"]) == open_stop("ab", []) == open_stop("x", ["y"]) == 0
