"""Datastores are made once and judged at the door, before a weight of the target is loaded."""

import gzip
import json

import attrs
import numpy as np
import pytest
from specdecode.contract import ConfigError
from specdecode.models import resolve_model, tokenizer_of
from specdecode.plugins import default_manager, prepare
from specdecode.testing.conformance import toy
from specdecode.testing.dry import recorded_target
from specdecode.testing.tiny import tiny_checkpoint

from specdec_retrieval import datastore
from specdec_retrieval.suffix_array import END


@pytest.fixture(scope="module")
def target():
    return toy().info


@pytest.fixture
def lines(tmp_path):
    """Writes a file of JSON lines."""

    def write(*entries, name="answers.jsonl"):
        file = tmp_path / name
        content = "".join(json.dumps(entry) + "\n" for entry in entries).encode()
        file.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        return file

    return write


def plan(target, path):
    config = {"method": "retrieval", "datastore": str(path), "num_speculative_tokens": 4}
    return prepare(default_manager(), config, target)


def refusal(target, path):
    with pytest.raises(ConfigError) as caught:
        plan(target, path)
    return str(caught.value)


def test_a_saved_datastore_is_mapped_as_it_was(tmp_path):
    store = datastore.build([[1, 2, 3], [], [2, 3]], "0123")
    datastore.save(store, tmp_path / "store")
    opened = datastore.open_directory(tmp_path / "store")
    assert isinstance(opened.text.base, np.memmap)
    assert opened.text.tolist() == [1, 2, 3, END, 2, 3, END]
    assert opened.order.tolist() == store.order.tolist() == [0, 4, 1, 5, 2]
    assert (opened.vocabulary, opened.highest_id, opened.num_answers, opened.num_tokens) == ("0123", 3, 2, 5)
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    with pytest.raises(ConfigError, match="is there already"):
        datastore.save(store, tmp_path / "store")


def test_of_too_many_tokens_the_last_answers_are_kept():
    assert datastore.build([[1, 1], [2], [3, 3]], None, max_tokens=5).text.tolist() == [2, END, 3, 3, END]


def test_answers_of_every_form_are_read_and_cut_by_the_target_s_tokenizer(lines, target):
    byte = 3  # the toy's ids are bytes + 3
    file = lines(
        {"prompt": "?", "answer": "ab"},
        {"messages": [{"role": "user", "content": "no"}, {"role": "assistant", "content": "cd"}]},
        {"conversations": [{"from": "human", "value": "no"}, {"from": "gpt", "value": "e"}]},
        {"prompt_token_ids": [1], "token_ids": [200, 201]},
        name="answers.jsonl.gz",
    )
    plan(target, file)
    store = datastore.load(file, target)
    expected = [*(c + byte for c in b"ab"), END, *(c + byte for c in b"cd"), END, b"e"[0] + byte, END]
    assert store.text.tolist() == [*expected, 200, 201, END]
    assert store.vocabulary


def test_what_is_no_datastore_is_refused(tmp_path, lines, target):
    assert "is not there; give a directory that `specdecode retrieval build` made" in refusal(
        target, tmp_path / "nothing"
    )
    assert "is no datastore; make one of past answers: specdecode retrieval build" in refusal(
        target, tmp_path
    )
    assert "entry 2 is none of" in refusal(target, lines({"answer": "a"}, {"question": "a"}))
    assert "entry 1 is none of" in refusal(target, lines({"token_ids": [1, -1]}))
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{")
    assert "line 1 is not JSON" in refusal(target, broken)
    assert "holds no answer" in refusal(target, lines({"answer": ""}))


def test_a_datastore_of_another_model_is_refused(tmp_path, lines, target):
    vocabulary = datastore.vocabulary_of(target.tokenizer)
    for name, told in (("own", vocabulary), ("unknown", None), ("other", "0" * 16)):
        datastore.save(datastore.build([[5, 6]], told), tmp_path / name)
    plan(target, tmp_path / "own")
    plan(target, tmp_path / "unknown")
    assert f"made with another tokenizer (vocabulary {'0' * 16}; the target's is {vocabulary})" in refusal(
        target, tmp_path / "other"
    )
    plan(recorded_target(300), tmp_path / "other")  # a replay of ids, which knows no tokenizer
    datastore.save(datastore.build([[target.vocab_size]], None), tmp_path / "larger")
    too_large = f"holds token id {target.vocab_size}, the target's vocabulary has {target.vocab_size}"
    assert too_large in refusal(target, tmp_path / "larger")
    plan(recorded_target(300), tmp_path / "larger")
    assert too_large in refusal(target, lines({"token_ids": [target.vocab_size]}))


def test_the_vocabulary_is_that_of_ordinary_tokens(tmp_path, target):
    same = tiny_checkpoint(tmp_path / "same", seed=7, num_hidden_layers=1)
    other = tiny_checkpoint(tmp_path / "other", vocab_size=200)
    tokenizer = same / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("<|im_end|>", "<|eot|>"))

    def of(path):
        return datastore.vocabulary_of(tokenizer_of(resolve_model(path)))

    assert of(same) == datastore.vocabulary_of(target.tokenizer) is not None
    assert of(other) != of(same)
    (other / "tokenizer.json").unlink()
    assert of(other) is None and datastore.vocabulary_of(None) is None


def test_text_without_a_tokenizer_is_refused(lines, target):
    told = refusal(attrs.evolve(target, tokenizer=None), lines({"answer": "a"}))
    assert "holds text, and the target has no tokenizer to cut it; index it first" in told


@pytest.mark.parametrize(
    ("file", "content", "told"),
    [
        ("datastore.json", b"{", "is damaged"),
        ("datastore.json", b'{"format": "specdec-retrieval", "version": 9}', "version 9; this is"),
        ("text.npy", b"", "is damaged"),
        ("order.npy", None, "is damaged"),
    ],
)
def test_a_damaged_datastore_is_refused(tmp_path, target, file, content, told):
    path = tmp_path / "store"
    datastore.save(datastore.build([[1, 2, 3, 4]], None), path)
    content = (path / file).read_bytes()[:-8] if content is None else content
    (path / file).write_bytes(content)
    assert told in refusal(target, path)


def test_nothing_is_unpickled(tmp_path, target):
    path = tmp_path / "store"
    datastore.save(datastore.build([[1, 2]], None), path)
    np.save(path / "text.npy", np.array([object()]), allow_pickle=True)
    assert "is damaged" in refusal(target, path)
