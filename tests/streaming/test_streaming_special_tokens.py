"""Special tokens in a stream: left out or shown, apart or side by side."""

from __future__ import annotations

import pytest

UNK, BOS, EOS, TOOL, NOTE = range(5)
#: Tokenizer -> ids of "a" and "b", and what stands between neighbouring tokens.
WORDS = {
    "byte-level": ([5 + ord("a"), 5 + ord("b")], ""),
    "byte-fallback": ([263, 264], ""),
    "word-piece": ([8, 9], " "),
    "no-decoder": ([5, 6], " "),
}

every_tokenizer = pytest.mark.parametrize("name", WORDS)
in_steps_of = pytest.mark.parametrize("size", [1, 2, 3, 7])


@every_tokenizer
@in_steps_of
def test_left_out(forced, name, size):
    """An added token that is not special is text."""
    (a, b), space = WORDS[name]
    streams = forced(name).run([a], [a, BOS, TOOL, b, UNK, NOTE, EOS, a], [size])
    assert streams.agreed().text == f"{space}a{space}b{space}<note>{space}a"


@every_tokenizer
@in_steps_of
def test_shown(forced, name, size):
    (a, b), space = WORDS[name]
    streams = forced(name).run([a], [a, BOS, TOOL, b, NOTE, EOS, a], [size], skip_special_tokens=False)
    assert streams.agreed().text == space + space.join(["a", "<s>", "<|tool|>", "b", "<note>", "</s>", "a"])


@every_tokenizer
@in_steps_of
def test_side_by_side(forced, name, size):
    """Without a space between two special tokens; one between a special token and a word stays."""
    (a, b), space = WORDS[name]
    fields = {"skip_special_tokens": False, "spaces_between_special_tokens": False}
    streams = forced(name).run([a], [a, BOS, EOS, b, NOTE, EOS, EOS, a], [size], **fields)
    assert streams.agreed().text == space + space.join(["a", "<s></s>", "b", "<note>", "</s></s>", "a"])


@pytest.mark.parametrize("name", ["byte-level", "byte-fallback"])
@in_steps_of
def test_they_stand_within_characters_and_stops(forced, whole, name, size):
    """Left out, they part neither; shown, both."""
    engine, (a, _) = forced(name), WORDS[name][0]
    ids = [5 + byte for byte in "世".encode()]
    ids[1:1] = [TOOL, EOS]
    ids += [5 + ord("S"), BOS, 5 + ord("T"), 5 + ord("!")]
    final = engine.run([a], ids, [size], stop="ST").agreed()
    assert (final.text, final.stop_reason, list(final.token_ids)) == ("世", "ST", ids[:-1])
    final = engine.run([a], ids, [size], stop="ST", skip_special_tokens=False).agreed()
    assert final.text == whole(engine.tokenizer, [a], ids, skip=False) and final.finish_reason == "length"
    assert final.text.startswith("\ufffd<|tool|></s>\ufffd") and final.text.endswith("<s>T!")


@every_tokenizer
@in_steps_of
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("include", [True, False])
def test_the_end_of_sequence_token_at_the_end(forced, name, size, skip, include):
    """It is in the ids; its text is there if stops and special tokens both are shown."""
    (a, b), space = WORDS[name]
    fields = {"ignore_eos": False, "skip_special_tokens": skip, "include_stop_str_in_output": include}
    final = forced(name).run([a], [a, b, EOS, a], [size], **fields).agreed()
    assert list(final.token_ids) == [a, b, EOS]
    assert (final.finish_reason, final.stop_reason) == ("stop", None)
    assert final.text == f"{space}a{space}b" + (f"{space}</s>" if include and not skip else "")


@every_tokenizer
@in_steps_of
def test_a_stop_string_that_is_a_special_token(forced, name, size):
    (a, b), space = WORDS[name]
    ids = [a, TOOL, b]
    final = forced(name).run([a], ids, [size], stop="<|tool|>", skip_special_tokens=False).agreed()
    assert (final.text, final.stop_reason, list(final.token_ids)) == (f"{space}a{space}", "<|tool|>", ids[:2])
    final = forced(name).run([a], ids, [size], stop="<|tool|>").agreed()
    assert (final.text, final.finish_reason) == (f"{space}a{space}b", "length")


@every_tokenizer
def test_no_text_without_detokenize(forced, name):
    (a, b), _ = WORDS[name]
    streams = forced(name).run([a], [a, b, EOS, a], [3], detokenize=False)
    assert streams.agreed().text == "" and streams.sent == [""] * len(streams.sizes)
