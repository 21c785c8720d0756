"""``specdecode retrieval``, as it is called."""

import json

import pytest
from specdecode.testing.conformance import toy, toy_target
from typer.testing import CliRunner

from specdec_retrieval.datastore import END, open_directory, vocabulary_of


@pytest.fixture
def invoke():
    from specdecode.cli.app import app

    return lambda *arguments: CliRunner().invoke(app, ["retrieval", *map(str, arguments)])


@pytest.fixture
def answers(tmp_path):
    folder = tmp_path / "answers"
    folder.mkdir()
    (folder / "1.jsonl").write_text('{"answer": "ab"}\n')
    (folder / "2.jsonl").write_text('{"answer": "abc"}\n\n{"token_ids": [9]}\n')
    (folder / "notes.txt").write_text("no answers")
    return folder


def test_a_directory_of_answers_becomes_a_datastore(tmp_path, invoke, answers):
    out = tmp_path / "store"
    done = invoke("build", answers, "--out", out, "--tokenizer", toy_target())
    assert done.exit_code == 0, done.output
    facts = {"answers": 3, "tokens": 6, "highest_id": 102, "vocabulary": vocabulary_of(toy().info.tokenizer)}
    assert json.loads(done.stdout) == {"datastore": str(out), **facts}
    assert json.loads(invoke("show", out).stdout) == facts
    assert open_directory(out).text.tolist() == [100, 101, END, 100, 101, 102, END, 9, END]


def test_only_the_last_answers_are_kept(tmp_path, invoke, answers):
    done = invoke("build", answers, "--out", tmp_path / "s", "--tokenizer", toy_target(), "--max-tokens", 3)
    assert json.loads(done.stdout)["answers"] == 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ["answers"],
            "tokenizer: answers hold text, which a tokenizer must cut into tokens: add --tokenizer",
        ),
        (["answers/1.jsonl", "nothing.jsonl"], "cannot read nothing.jsonl"),
        (["empty"], "has no *.jsonl file"),
    ],
)
def test_faults_are_told(tmp_path, invoke, answers, monkeypatch, arguments, told):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    more = [] if "--tokenizer" in told else ["--tokenizer", toy_target()]
    done = invoke("build", *arguments, "--out", "store", *more)
    assert done.exit_code == 1
    assert told in done.output
    assert not (tmp_path / "store").exists()


def test_showing_what_is_no_datastore(tmp_path, invoke):
    done = invoke("show", tmp_path)
    assert done.exit_code == 1
    assert f"datastore: {tmp_path} is no datastore" in done.output
