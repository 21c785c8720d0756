"""Tokenizers compared by their files."""

from __future__ import annotations

import json

import pytest
from specdecode.contract import ConfigError
from specdecode.heads.tokenizers import check_tokenizer, first_difference, read_entries

WORDS = ["<s>", "</s>", "a", "b", "c", "d"]


def write(folder, words, special=2, unigram=False):
    folder.mkdir(exist_ok=True)
    vocab = [[word, 0.0] for word in words] if unigram else {word: i for i, word in enumerate(words)}
    added = [{"id": i, "content": words[i], "special": True} for i in range(special)]
    content = {"model": {"vocab": vocab}, "added_tokens": added}
    (folder / "tokenizer.json").write_text(json.dumps(content), "utf-8")
    return folder


@pytest.mark.parametrize("unigram", [False, True])
def test_entries_of_every_form(tmp_path, unigram):
    entries = read_entries(write(tmp_path, WORDS, unigram=unigram))
    assert dict(entries.tokens) == dict(enumerate(WORDS)) and entries.special == {0, 1}


def test_entries_of_a_vocab_json_or_none(tmp_path):
    assert read_entries(tmp_path) is None
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "b": 1}), "utf-8")
    assert dict(read_entries(tmp_path).tokens) == {0: "a", 1: "b"}


def test_a_file_that_changed_is_read_anew(tmp_path):
    import os

    write(tmp_path, WORDS)
    assert read_entries(tmp_path).tokens[2] == "a"
    write(tmp_path, ["<s>", "</s>", "z"])
    os.utime(tmp_path / "tokenizer.json", ns=(1, 1))
    assert read_entries(tmp_path).tokens[2] == "z"


@pytest.mark.parametrize("text", ["{", "[]", '{"model": {}}', '{"model": {"vocab": {"a": "b"}}}'])
def test_a_damaged_file_is_named(tmp_path, text):
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read as a tokenizer"):
        read_entries(tmp_path)


@pytest.mark.parametrize(
    ("theirs", "first"),
    [
        (WORDS, None),
        (WORDS[:4], None),  # fewer
        ([*WORDS, "e"], None),  # more
        (["<s>", "<end>", *WORDS[2:]], None),  # a control token of another name
        (["<s>", "</s>", "a", "c", "b", "d"], 3),
    ],
)
def test_the_first_difference(tmp_path, theirs, first):
    ours, other = (read_entries(write(tmp_path / n, w)) for n, w in (("ours", WORDS), ("theirs", theirs)))
    assert first_difference(ours, other) == first


def test_a_head_of_another_tokenizer_is_refused_by_the_first_token_that_differs(tmp_path):
    ours, bare = write(tmp_path / "ours", WORDS), tmp_path / "bare"
    bare.mkdir()
    check_tokenizer(bare, ours, "the head")  # most heads carry none
    check_tokenizer(write(tmp_path / "same", WORDS), str(ours), "the head")
    other = write(tmp_path / "other", ["<s>", "</s>", "a", "c", "b", "d"])
    with pytest.raises(
        ConfigError, match=r"the head was made for another tokenizer: its token 3 is 'c', .* 'b'"
    ):
        check_tokenizer(other, ours, "the head")
