"""``specdecode chat`` on a real engine with a tiny model: piped input, streaming, commands."""

from __future__ import annotations

import json
import signal

import pytest
from specdecode.cli import chat as command

NGRAM = ("--spec-method", "ngram", "--spec-tokens", "3", "--spec-option", "prompt_lookup_min=1")


def answers(result):
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_each_line_of_a_pipe_is_a_message_and_the_conversation_goes_on(invoke, tiny_model):
    arguments = ("chat", "-m", tiny_model, "--max-tokens", "12", "--json")
    first, second = answers(invoke(*arguments, input="hi\n\nand then?"))
    assert (first["message"], second["message"]) == ("hi", "and then?")
    (alone,) = answers(
        invoke("generate", "-m", tiny_model, "-p", "hi", "--chat", "--max-tokens", "12", "--json")
    )[0]["outputs"]
    assert (first["token_ids"], first["text"]) == (alone["token_ids"], alone["text"])
    assert first["finish_reason"] == "length" and first["metrics"]["accepted"] == 0


def test_speculation_changes_nothing_but_the_sources(invoke, tiny_model):
    arguments = ("chat", "-m", tiny_model, "--max-tokens", "30", "--json")
    plain = answers(invoke(*arguments, input="hi\nho\n"))
    drafted = answers(invoke(*arguments, *NGRAM, input="hi\nho\n"))
    assert [a["token_ids"] for a in plain] == [a["token_ids"] for a in drafted]
    assert [a["text"] for a in plain] == [a["text"] for a in drafted]
    for answer in drafted:
        assert answer["token_sources"].count("draft") == answer["metrics"]["accepted"] > 0


def test_text_is_the_same_as_in_json_and_drafts_can_be_marked(invoke, tiny_model):
    arguments = ("chat", "-m", tiny_model, "--max-tokens", "30", *NGRAM)
    (answer,) = answers(invoke(*arguments, "--json", input="hi\n"))
    bare = invoke(*arguments, input="hi\n")
    shown = invoke(*arguments, "--show-drafts", input="hi\n")
    assert bare.exit_code == shown.exit_code == 0
    assert bare.stdout == answer["text"] + "\n"
    assert "«" in shown.stdout and shown.stdout.replace("«", "").replace("»", "") == bare.stdout


def test_commands(invoke, tiny_model):
    result = invoke(
        "chat", "-m", tiny_model, "--max-tokens", "4", "--json", input="a\n/help\n/reset\nb\n/exit\nc\n"
    )
    assert [answer["message"] for answer in answers(result)] == ["a", "b"]
    assert all(command in result.stderr for command in ("/exit", "/reset", "/help"))


@pytest.fixture
def engine(tiny_model):
    from specdecode import LLM

    with LLM(tiny_model, dtype="float32", max_model_len=128) as llm:
        yield llm.llm_engine


@pytest.fixture
def talk(engine):
    from specdecode import SamplingParams
    from specdecode.api.chat import ChatOptions

    return command.Conversation(
        engine, SamplingParams(temperature=0.0, max_tokens=6), ChatOptions(), "be kind"
    )


def test_an_answer_comes_token_by_token_and_is_remembered(engine, talk):
    outputs = list(talk.answer("hi"))
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1] * 6
    assert [output.finished for output in outputs] == [False] * 5 + [True]
    text = "".join(output.outputs[0].text for output in outputs)
    assert talk.messages == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": text},
    ]
    (first, *_) = talk.answer("more")
    assert first.prompt.startswith("<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n")
    assert first.num_cached_tokens > 0
    talk.reset()
    assert talk.messages == [{"role": "system", "content": "be kind"}]


def test_an_answer_that_is_cut_short_frees_the_engine_and_keeps_what_was_said(engine, talk):
    answer = talk.answer("hi")
    said = next(answer).outputs[0].text
    answer.close()
    assert not engine.has_unfinished_requests()
    assert talk.messages[-1] == {"role": "assistant", "content": said}


def test_ctrl_c_ends_the_answer_and_not_the_conversation(talk, monkeypatch, capsys):
    class Pressing(command.TextWriter):
        def write(self, message, outputs):
            def pressed():
                for output in outputs:
                    if message == "stop me":
                        signal.raise_signal(signal.SIGINT)
                    yield output

            super().write(message, pressed())

    lines = iter(["stop me", "go on"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines, None) or (_ for _ in ()).throw(EOFError))
    before = signal.getsignal(signal.SIGINT)
    command.converse(talk, Pressing(), typed=True)
    assert signal.getsignal(signal.SIGINT) is before
    first, second = talk.messages[2]["content"], talk.messages[4]["content"]
    assert len(first) < len(second) and capsys.readouterr().out == f"{first}\n{second}\n"


def test_a_typed_message_that_is_too_long_is_told_and_forgotten(talk, monkeypatch, capsys):
    lines = iter(["x" * 130, "hi"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines, None) or (_ for _ in ()).throw(EOFError))
    command.converse(talk, command.TextWriter(), typed=True)
    assert [message["content"] for message in talk.messages[:2]] == ["be kind", "hi"]
    assert "max_model_len=128" in capsys.readouterr().err


def test_a_piped_message_that_is_too_long_ends_the_command(invoke, tiny_model):
    result = invoke("chat", "-m", tiny_model, "--max-model-len", "128", input="x" * 130 + "\nhi\n")
    assert result.exit_code == 1 and "max_model_len=128" in result.stderr and not result.stdout


def test_a_template_of_ones_own(invoke, tiny_model, tmp_path):
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}{{ m.content }};{% endfor %}")
    arguments = ("chat", "-m", tiny_model, "--max-tokens", "3", "--json")
    (own,) = answers(invoke(*arguments, "--chat-template", str(template), input="q\n"))
    (plain,) = answers(invoke("generate", "-m", tiny_model, "-p", "q;", "--max-tokens", "3", "--json"))[0][
        "outputs"
    ]
    assert own["token_ids"] == plain["token_ids"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--show-drafts",), "--show-drafts has nothing to show without speculation"),
        (("--chat-template", "nowhere"), "--chat-template: cannot read nowhere"),
        (("--temperature", "nan"), "temperature"),
        (("--spec-method", "ngrma", "--spec-tokens", "3"), "ngram"),
    ],
)
def test_wrong_options_end_with_one_clear_message(invoke, tiny_model, arguments, message):
    result = invoke("chat", "-m", tiny_model, *arguments, input="hi\n")
    assert result.exit_code == 1
    assert message in result.stderr and not result.stdout and "Traceback" not in result.stderr
