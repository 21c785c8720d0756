"""Past conversations, in every form that files hold them in."""

import gzip
import json

import pytest
from specdecode.contract import ConfigError
from specdecode.conversations import Exchange, read_exchanges

ASKED = {"role": "user", "content": "a?"}
SAID = {"role": "assistant", "content": "a."}


@pytest.fixture
def lines(tmp_path):
    def write(*entries, name="log.jsonl"):
        file = tmp_path / name
        content = "".join(json.dumps(entry) + "\n\n" for entry in entries).encode()
        file.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        return file

    return write


def test_every_answer_is_read_with_what_stood_before_it(lines):
    file = lines(
        {"messages": [ASKED, SAID, {"role": "tool", "content": None}, ASKED, {**SAID, "content": "b."}]},
        {"id": 5, "conversations": [{"from": "human", "value": "a?"}, {"from": "gpt", "value": "c."}]},
        {"prompt": "p", "answer": "d."},
        {"prompt_token_ids": [1, 2], "token_ids": [3]},
        {"prompt": "p", "answer": ""},
        {"messages": [SAID]},
    )
    assert list(read_exchanges(file)) == [
        Exchange(prompt=[ASKED], answer="a."),
        Exchange(prompt=[ASKED, SAID, ASKED], answer="b."),
        Exchange(prompt=[ASKED], answer="c."),
        Exchange(prompt="p", answer="d."),
        Exchange(prompt=[1, 2], answer=[3]),
    ]


def test_answers_alone_do_where_no_prompt_is_asked_for(lines):
    file = lines({"answer": "a"}, {"token_ids": [7]}, {"messages": [SAID]}, name="log.jsonl.gz")
    assert [e.answer for e in read_exchanges(file, prompts=False)] == ["a", [7], "a."]
    assert not any(e.prompt for e in read_exchanges(file, prompts=False))
    with pytest.raises(ConfigError, match="entry 1 is none of"):
        list(read_exchanges(file))


def test_folders_are_read_in_the_order_of_their_names(lines, tmp_path):
    for name in ("b.jsonl", "a.jsonl.gz", "notes.txt"):
        lines({"answer": name}, name=name)
    found = read_exchanges([tmp_path, tmp_path / "b.jsonl"], prompts=False)
    assert [e.answer for e in found] == ["a.jsonl.gz", "b.jsonl", "b.jsonl"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"log: .*empty has no \*\.jsonl file"):
        list(read_exchanges(tmp_path / "empty", field="log"))


@pytest.mark.parametrize(
    "entry",
    [
        {"text": "x"},
        {"prompt": "x"},
        {"prompt": 1, "answer": "x"},
        {"prompt_token_ids": [1], "token_ids": [-1]},
        {"prompt_token_ids": [1], "token_ids": [True]},
        {"prompt_token_ids": [1], "token_ids": "12"},
        {"messages": [{"role": "assistant"}]},
        [1],
    ],
)
def test_what_has_no_such_form_is_refused_by_its_place(lines, entry):
    with pytest.raises(ConfigError, match=r"file: .*, entry 2 is none of"):
        list(read_exchanges(lines({"prompt": "a", "answer": "b"}, entry)))
