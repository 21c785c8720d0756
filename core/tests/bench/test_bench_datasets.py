"""Dataset files: what is taken from each format, and how a wrong file is told."""

import csv
import gzip
import json

import pytest
from specdecode.bench.datasets import FORMATS, SUMMARISE, read_dataset
from specdecode.contract import ConfigError

SHAREGPT = [
    {"id": "a", "conversations": [{"from": "human", "value": " Hi "}, {"from": "gpt", "value": "Hello"}]},
    {"id": "b", "conversations": [{"from": "gpt", "value": "..."}, {"from": "user", "value": "More?"}]},
    {"id": "c", "conversations": [{"from": "gpt", "value": "alone"}]},
    {"id": "d", "conversations": []},
    {"id": "e", "conversations": [{"from": "human", "value": ""}]},
    {"id": "a", "conversations": [{"from": "human", "value": "Again"}]},
]
HUMANEVAL = [
    {"task_id": "HumanEval/0", "prompt": "def f():\n    ", "entry_point": "f", "canonical_solution": "pass"},
    {"task_id": "HumanEval/1", "prompt": "def g():\n", "entry_point": "g"},
]
MT_BENCH = [
    {"question_id": 81, "category": "writing", "turns": ["Write.", "Rewrite."], "reference": []},
    {"question_id": 101, "category": "reasoning", "turns": ["Think."]},
    {"question_id": 82, "category": "writing", "turns": ["Draft."]},
]


def lines(entries):
    return "\n".join(map(json.dumps, entries)) + "\n"


@pytest.fixture
def write(tmp_path):
    def write(name, content):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def shown(tasks):
    return [(task.name, prompt.id, prompt.text) for task in tasks for prompt in task.prompts]


@pytest.mark.parametrize("form", [json.dumps, lines], ids=["json", "json-lines"])
def test_sharegpt_gives_the_first_user_turn_of_each_conversation(write, form):
    tasks = read_dataset(write("share.json", form(SHAREGPT)), "sharegpt")
    assert shown(tasks) == [("share", "a", "Hi"), ("share", "b", "More?"), ("share", "a#2", "Again")]


def test_humaneval_gives_the_code_to_complete_as_it_is(write):
    path = write("HumanEval.jsonl.gz", gzip.compress(lines(HUMANEVAL).encode()))
    (task,) = read_dataset(path, "humaneval")
    assert [(p.id, p.text) for p in task.prompts] == [
        ("HumanEval/0", "def f():\n    "),
        ("HumanEval/1", "def g():\n"),
    ]


def test_mt_bench_gives_first_turns_by_category(write):
    tasks = read_dataset(write("question.jsonl", lines(MT_BENCH)), "mt_bench")
    assert shown(tasks) == [
        ("writing", "81", "Write."),
        ("writing", "82", "Draft."),
        ("reasoning", "101", "Think."),
    ]


def test_messages_give_every_turn_behind_those_before_it(write):
    roles = ("system", "user", "assistant", "user", "assistant")
    said = list(zip(roles, ("Be brief.", "Write.", "A.", "Again.", "B."), strict=True))
    entry = {"task": "edit", "id": "e1", "messages": [{"role": r, "content": c} for r, c in said]}
    silent = {"messages": [{"role": "assistant", "content": "Hello"}]}
    path = write("talks.jsonl", lines([entry, silent, {"messages": entry["messages"][1:2]}]))
    tasks = read_dataset(path, "messages")
    assert shown(tasks) == [("edit", "e1/1", "Write."), ("edit", "e1/2", "Again."), ("talks", "3", "Write.")]
    first, second = tasks[0].prompts
    assert first.messages == [{"role": r, "content": c} for r, c in said[:2]]
    assert second.messages == [{"role": r, "content": c} for r, c in said[:4]]
    assert second.whole == "Be brief.\n\nWrite.\n\nA.\n\nAgain."
    assert shown(read_dataset(path, "messages", 1)) == [("edit", "e1/1", "Write.")]


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_cnn_dailymail_asks_for_a_summary_of_the_article(write, suffix):
    article = 'A long story,\nwith "quotes". ' * 6000  # more than the csv module takes by default
    entry = {"id": "f00", "article": article, "highlights": "short"}
    path = write(f"test.{suffix}", lines([entry]))
    if suffix == "csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, entry)
            writer.writeheader()
            writer.writerow(entry)
    (task,) = read_dataset(path, "cnn_dailymail")
    assert [(p.id, p.text) for p in task.prompts] == [("f00", SUMMARISE + article.strip())]


def test_lines_of_ones_own_may_hold_more_than_a_prompt(write):
    entries = [{"prompt": "a", "answer": 1}, {"prompt": "b", "task": "t", "id": 7}]
    assert shown(read_dataset(write("mine.jsonl", lines(entries)), "jsonl")) == [
        ("mine", "1", "a"),
        ("t", "7", "b"),
    ]


@pytest.mark.parametrize("limit", [1, 2, 3, 9])
def test_the_first_prompts_are_taken_whatever_their_task(write, limit):
    tasks = read_dataset(write("question.jsonl", lines(MT_BENCH)), "mt_bench", limit)
    assert {prompt.id for task in tasks for prompt in task.prompts} == set(["81", "101", "82"][:limit])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "entry", [{"text": "x"}, "x", 3, None, {"prompt": 3}, {"turns": "x", "category": "c"}, {"article": ""}]
)
def test_an_entry_of_another_format_is_named_with_what_is_wanted(write, name, entry):
    with pytest.raises(ConfigError) as caught:
        read_dataset(write("other.jsonl", lines([entry])), name)
    assert "other.jsonl, entry 1 h" in str(caught.value)  # has, holds
    assert f"; {name} wants {FORMATS[name].shape}" in str(caught.value)


@pytest.mark.parametrize(
    "turns", ["x", [3], [{"value": "x"}], [{"from": "human"}]], ids=["text", "number", "no-from", "no-value"]
)
def test_wrong_turns_are_named(write, turns):
    with pytest.raises(ConfigError, match=r"share\.json, entry 1 h"):
        read_dataset(write("share.json", lines([{"conversations": turns}])), "sharegpt")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "[{]", "is not JSON"),
        ("a.jsonl", '{"prompt": "x"}\n{', "line 2 is not JSON"),
        ("a.jsonl", "\n \n", "holds no prompt; jsonl wants"),
        ("a.jsonl", "[]", "holds no prompt"),
        ("a.parquet", b"PAR1\xff\xfe", "is not UTF-8 text .byte 4."),
        ("a.gz", b"\x1f\x8b\x08", "cannot read"),
    ],
)
def test_files_that_cannot_be_read(write, name, content, message):
    with pytest.raises(ConfigError, match=message):
        read_dataset(write(name, content), "jsonl")


def test_an_unknown_format_and_a_missing_file(tmp_path):
    with pytest.raises(
        ConfigError, match="must be one of jsonl, sharegpt, cnn_dailymail, humaneval, mt_bench"
    ):
        read_dataset(tmp_path / "x", "gsm8k")
    with pytest.raises(ConfigError, match=r"cannot read .*nowhere\.json: No such file"):
        read_dataset(tmp_path / "nowhere.json", "sharegpt")
