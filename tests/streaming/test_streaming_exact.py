"""Streamed text is what the tokenizer decodes: any tokens, in any steps, in every mode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

REPLACEMENT = "\ufffd"
NAMES = (
    "byte-level",
    "byte-fallback",
    "byte-fallback-bare",
    "metaspace",
    "word-piece",
    "suffix",
    "no-decoder",
)
#: Of these tokenizers the 256 bytes have the ids from 5 on.
OF_BYTES = NAMES[:3]
TEXT = "A 世a🙂b é"

every_tokenizer = pytest.mark.parametrize("name", NAMES)
of_bytes = pytest.mark.parametrize("name", OF_BYTES)
modes = st.fixed_dictionaries({"skip": st.booleans(), "spaces": st.booleans()})


def checked(examples: int) -> Any:
    """Settings of a test with so many examples, always the same ones."""
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )


def bytes_of(text: str) -> list[int]:
    return [5 + byte for byte in text.encode()]


#: Tokens: of whole characters, of some of their bytes, and any; id 299 is no token of any tokenizer here.
tokens = st.lists(
    st.one_of(
        st.sampled_from("aé世🙂 b").map(bytes_of),
        st.sampled_from("é世🙂").map(lambda c: bytes_of(c)[:-1]),
        st.integers(0, 4).map(lambda t: [t]),
        st.integers(5, 284).map(lambda t: [t]),
        st.integers(260, 284).map(lambda t: [t]),
        st.just([299]),
    ),
    max_size=14,
).map(lambda groups: [token for group in groups for token in group])


def fitting(ids: Sequence[int], tokenizer: Any) -> list[int]:
    """``ids`` of a larger vocabulary, folded into that of ``tokenizer``; one stays outside."""
    return [token if token == 299 else token % len(tokenizer) for token in ids]


def detokenizer(tokenizer: Any, prompt: Sequence[int], mode: dict[str, bool]) -> Any:
    from specdecode.engine.detokenize import Detokenizer

    return Detokenizer(tokenizer, prompt, skip_special_tokens=mode["skip"], spaces=mode["spaces"])


@every_tokenizer
@checked(200)
@given(prompt=tokens, output=tokens, mode=modes)
@example(prompt=[1], output=[*bytes_of("世"), 5 + 0xE4, 8], mode={"skip": True, "spaces": True})
@example(
    prompt=bytes_of("世")[:2], output=[*bytes_of("世")[2:], 5 + 0xE4], mode={"skip": True, "spaces": True}
)
@example(prompt=[], output=[1, 2, 0, 1, 3, 261, 1, 1], mode={"skip": False, "spaces": False})
@example(prompt=[261], output=[5 + 0xFF] * 60 + [261], mode={"skip": True, "spaces": True})
@example(prompt=[261], output=[2, 299] * 40 + [262], mode={"skip": True, "spaces": True})
@example(prompt=[1], output=bytes_of(TEXT) * 5 + [262, 263, 2, 264] * 9, mode={"skip": True, "spaces": True})
def test_token_by_token(tokenizers, whole, name, prompt, output, mode):
    """After each token ``text + pending`` is the tokenizer's decode; what is settled stays."""
    tokenizer = tokenizers[name]
    prompt, output = fitting(prompt, tokenizer), fitting(output, tokenizer)
    mine, settled = detokenizer(tokenizer, prompt, mode), []
    for count, token in enumerate(output, 1):
        before = mine.text
        added = mine.append(token)
        assert mine.text == before + mine.text[len(before) :] and len(mine.text) - len(before) == added
        assert mine.text + mine.pending == whole(tokenizer, prompt, output[:count], **mode)
        settled.append(mine.text)
    everything = mine.text + mine.pending
    assert all(everything.startswith(text) for text in settled)
    mine.flush()
    assert (mine.text, mine.pending) == (everything, "")


@every_tokenizer
@checked(100)
@given(output=tokens)
def test_nothing_is_held_back_for_longer_than_it_can_change(tokenizers, name, output):
    """Only a character's beginning waits, and a run of byte tokens until another token ends it."""
    tokenizer = tokenizers[name]
    output = fitting(output, tokenizer)
    mine = detokenizer(tokenizer, [], {"skip": True, "spaces": True})
    for token in output:
        mine.append(token)
        in_run = name.startswith("byte-fallback") and 5 <= token < 261
        assert in_run or mine.pending in ("", REPLACEMENT) or token in (0, 1, 2, 3, 299)


@every_tokenizer
def test_what_is_decoded_again_stays_short(tokenizers, name, monkeypatch):
    """A long output costs the same for each token, special tokens and unknown ids included."""
    tokenizer, longest = tokenizers[name], 0
    one = len(tokenizer) - 3
    decode = type(tokenizer).decode

    def measured(self, ids, **options):
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(self, ids, **options)

    monkeypatch.setattr(type(tokenizer), "decode", measured)
    for filler in (one, 2, 299, 5 + 0xFF if name == "byte-level" else one):
        mine = detokenizer(tokenizer, [one] * 500, {"skip": True, "spaces": True})
        for token in [one, *[filler] * 200, one]:
            mine.append(token)
    assert 0 < longest <= 32


@pytest.mark.parametrize("name", ["byte-fallback", "byte-fallback-bare", "metaspace"])
def test_tokens_without_a_text(tokenizers, whole, name):
    """However many stand before a word, it keeps its space."""
    tokenizer = tokenizers[name]
    word, nothing = tokenizer.convert_tokens_to_ids(["▁a", ""])
    output = [word, *[nothing] * 40, word, *[nothing] * 40, word]
    mine = detokenizer(tokenizer, [word], {"skip": True, "spaces": True})
    for token in output:
        mine.append(token)
    assert mine.text == whole(tokenizer, [word], output) == " a a a"


@of_bytes
def test_no_replacement_within_whole_characters(tokenizers, name):
    mine = detokenizer(tokenizers[name], [261], {"skip": True, "spaces": True})
    for token in bytes_of(TEXT):
        mine.append(token)
        assert REPLACEMENT not in mine.text and REPLACEMENT not in mine.legible
    mine.flush()
    assert mine.text == TEXT


@of_bytes
@pytest.mark.parametrize("kept", [1, 2, 3])
def test_an_output_that_ends_inside_a_character_shows_it_at_its_end_alone(tokenizers, name, kept):
    ids = [*bytes_of("a"), *bytes_of("🙂")[:kept]]
    mine = detokenizer(tokenizers[name], [261], {"skip": True, "spaces": True})
    for token in ids:
        mine.append(token)
        assert REPLACEMENT not in mine.text
    mine.flush()
    assert mine.text.endswith(REPLACEMENT)


@every_tokenizer
@checked(30)
@given(
    prompt=tokens.filter(bool),
    output=tokens.filter(bool),
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=6),
    mode=modes,
)
def test_in_any_steps(forced, whole, name, prompt, output, sizes, mode):
    """Through the engine: deltas, cumulative outputs and the final one, whatever a step brings."""
    engine = forced(name)
    prompt, output = fitting(prompt, engine.tokenizer)[:60], fitting(output, engine.tokenizer)[:60]
    fields = {"skip_special_tokens": mode["skip"], "spaces_between_special_tokens": mode["spaces"]}
    streams = engine.run(prompt, output, sizes, **fields)
    final = streams.agreed()
    assert list(final.token_ids) == output and final.finish_reason == "length"
    assert final.text == whole(engine.tokenizer, prompt, output, **mode)
    wanted = [min(size, 7) for size in sizes]
    assert len(streams.sizes) == 1 or set(streams.sizes[1:-1]) <= set(wanted)


@of_bytes
@pytest.mark.parametrize("size", range(1, 8))
def test_characters_over_steps(forced, name, size):
    """Every character that is complete and cannot change is sent, and none before."""
    streams = forced(name).run([261], bytes_of(TEXT), [size])
    assert streams.agreed().text == TEXT
    assert all(REPLACEMENT not in text and TEXT.startswith(text) for text in streams.sent)
    if name == "byte-level":
        sent, done = [], 0
        for count in streams.sizes:
            done += count
            sent.append(TEXT.encode()[:done].decode(errors="ignore"))
        assert streams.sent == sent
