"""The built-in prompts, and prompts from a user's file."""

import itertools
import json
from pathlib import Path

import pytest
from specdecode.bench.tasks import builtin_tasks, load_tasks, pick
from specdecode.contract import ConfigError


def test_the_builtin_set_covers_its_kinds_with_real_prompts():
    tasks = builtin_tasks()
    assert {task.name for task in tasks} == {"summarise", "edit-code", "answer", "chat"}
    for task in tasks:
        assert 3 <= len(task.prompts) <= 4 and task.summary
        assert len({prompt.id for prompt in task.prompts}) == len(task.prompts)
        for prompt in task.prompts:
            assert prompt.text == prompt.text.strip()
            assert 70 <= len(prompt.text.split()) <= 500


def test_the_repetitive_set_does_each_piece_of_work_again_and_again():
    tasks = builtin_tasks("repetitive")
    assert {task.name for task in tasks} == {"edit-file", "fill-template", "agent-loop"}
    assert sum(len(task.prompts) for task in tasks) >= 12
    for task in tasks:
        assert len(task.prompts) >= 5 and len({prompt.id for prompt in task.prompts}) == len(task.prompts)
        words = [prompt.text.split() for prompt in task.prompts]
        for before, after in itertools.pairwise(words):
            assert len(set(before) & set(after)) > len(set(after)) / 2  # the same again,
            assert before != after  # but not quite
    (edits,) = pick(tasks, ["edit-file"])
    for before, after in itertools.pairwise(edits.prompts):  # each as the last edit left it
        done = before.text.rpartition(" with ")[2].rstrip(".")
        assert done in after.text and done not in before.text.rpartition("Write")[0]


def test_code_keeps_its_indentation():
    (edit,) = pick(builtin_tasks(), ["edit-code"])
    assert "\n    settings = dict(defaults or {})\n" in edit.prompts[0].text


def test_picking_keeps_the_order_of_names_and_refuses_unknown_ones():
    tasks = builtin_tasks()
    assert [task.name for task in pick(tasks, ["chat", "answer", "chat"])] == ["chat", "answer"]
    assert pick(tasks, None) == tasks
    with pytest.raises(ConfigError, match="no 'poetry'; there are answer, chat, edit-code, summarise"):
        pick(tasks, ["chat", "poetry"])


def write(tmp_path: Path, name: str, text: str) -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_plain_files_hold_a_prompt_a_line(tmp_path):
    (task,) = load_tasks(write(tmp_path, "mine.txt", "\ufefffirst one\n\n  second\u2028one \n"))
    assert task.name == "mine"
    assert [(p.id, p.text) for p in task.prompts] == [("1", "first one"), ("3", "second\u2028one")]


def test_json_lines_are_grouped_by_task_in_the_order_met(tmp_path):
    lines = [
        {"prompt": "a\nb", "task": "x"},
        {"prompt": "c"},
        {"prompt": "d", "task": "x"},
    ]
    path = write(tmp_path, "mine.jsonl", "\n".join(map(json.dumps, lines)))
    assert [(t.name, [p.text for p in t.prompts]) for t in load_tasks(path)] == [
        ("x", ["a\nb", "d"]),
        ("mine", ["c"]),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ('"text"', 'expected an object such as {"prompt": "..."}, got "text"'),
        ("{}", "'prompt' must be a text that is not empty, got None"),
        ('{"prompt": "  "}', "'prompt' must be a text that is not empty, got '  '"),
        ('{"prompt": 3}', "'prompt' must be a text that is not empty, got 3"),
        ('{"prompt": "a", "task": ""}', "'task' must be a name, got ''"),
        ('{"prompt": "a", "taks": "b"}', "unknown key 'taks'; the keys are 'prompt' and 'task'"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, message):
    path = write(tmp_path, "mine.jsonl", f'{{"prompt": "good"}}\n{line}\n')
    with pytest.raises(ConfigError) as caught:
        load_tasks(path)
    assert f"{path}, line 2: " in str(caught.value) and message in str(caught.value)


def test_all_wrong_lines_are_told_at_once(tmp_path):
    with pytest.raises(ConfigError) as caught:
        load_tasks(write(tmp_path, "mine.jsonl", "{\n{}\n"))
    assert [fault.split(": ")[1].rsplit(", ")[-1] for fault in caught.value.faults] == ["line 1", "line 2"]


def test_files_that_give_no_prompt_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*nowhere\.txt: No such file"):
        load_tasks(tmp_path / "nowhere.txt")
    with pytest.raises(ConfigError, match="holds no prompt"):
        load_tasks(write(tmp_path, "empty.txt", "\n \n"))
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"ok\n\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8 text"):
        load_tasks(binary)
