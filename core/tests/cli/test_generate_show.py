"""Marking accepted drafts in a text."""

import io
from types import SimpleNamespace
from typing import ClassVar

import pytest
from rich.console import Console
from specdecode.api.segments import Segment, segments
from specdecode.cli.show import legend, marked, print_marked


class Bytes:
    """A tokenizer of one id a byte; 256 is a special token."""

    all_special_ids = (256,)
    added_tokens_decoder: ClassVar[dict] = {}

    def decode(self, ids, **options):
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    def convert_ids_to_tokens(self, token):
        return chr(token)

    def convert_tokens_to_ids(self, tokens):
        return [None for _ in tokens]


class ByteTokens(Bytes):
    """Each byte is a token such as <0xE4>, and a run of them is decoded as a whole."""

    def convert_ids_to_tokens(self, token):
        return f"<0x{token:02X}>" if token < 256 else "<s>"

    def convert_tokens_to_ids(self, tokens):
        return [int(token[1:-1], 16) for token in tokens]


def completion(parts, text=None):
    """``parts``: bytes and whether they are drafts."""
    ids = [i for data, _ in parts for i in data]
    sources = ["draft" if drafted else "target" for data, drafted in parts for _ in data]
    whole = Bytes().decode(ids)
    return SimpleNamespace(token_ids=ids, token_sources=sources, text=whole if text is None else text)


def pieces(parts, text=None, tokenizer=None):
    return [(s.text, s.drafted) for s in segments(tokenizer or Bytes(), [1, 2], completion(parts, text))]


def test_neighbours_of_one_source_are_one_segment():
    parts = [(b"a", False), (b"bc", True), (b"d", True), (b"e", False)]
    assert pieces(parts) == [("a", False), ("bcd", True), ("e", False)]


@pytest.mark.parametrize("tokenizer", [Bytes(), ByteTokens()])
@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_character_belongs_to_the_token_that_completes_it(cut, tokenizer):
    wave = "👋".encode()
    parts = [(b"x" + wave[:cut], False), (wave[cut:], True), ("é".encode(), False)]
    assert pieces(parts, tokenizer=tokenizer) == [("x", False), ("👋", True), ("é", False)]


def test_text_cut_by_a_stop_string_is_not_shown():
    parts = [(b"one ", False), (b"two STOP", True), (b"x", False)]
    assert pieces(parts, text="one two ") == [("one ", False), ("two ", True)]
    assert pieces(parts, text="on") == [("on", False)]
    assert pieces(parts, text="") == []


def test_an_output_that_ends_within_a_character_shows_what_the_text_has():
    parts = [(b"x", False), ("👋".encode()[:2], True)]
    assert "".join(text for text, _ in pieces(parts)) == completion(parts).text


def test_special_tokens_show_nothing():
    parts = [(b"a", False), ([256], True), (b"b", False)]
    assert pieces(parts) == [("ab", False)]


def rendered(**options):
    console = Console(file=io.StringIO(), width=20, **options)
    print_marked(console, [Segment("plain [b]text[/b] ", False), Segment("drafted: a long line", True)])
    return console.file.getvalue()


def test_marks_where_there_is_no_colour(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    expected = "plain [b]text[/b] «drafted: a long line»\n"
    assert rendered() == expected
    monkeypatch.setenv("NO_COLOR", "1")
    assert "«drafted: a long line»" in rendered(force_terminal=True, color_system="truecolor")


def test_colour_on_a_terminal(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    text = rendered(force_terminal=True, color_system="standard")
    assert "«" not in text and "\x1b[32mdrafted: a long line\x1b[0m" in text


def test_the_legend_is_marked_like_the_text():
    assert "«accepted draft tokens»" in legend(Console(file=io.StringIO())).plain


def test_marking_keeps_the_text():
    parts = [Segment("a", False), Segment("b", True)]
    assert marked(parts, colour=True).plain == "ab"
    assert marked(parts, colour=False).plain == "a«b»"
