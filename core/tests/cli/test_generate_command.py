"""``specdecode generate`` on a real engine with a tiny model."""

import json

import pytest

NGRAM = ("--spec-method", "ngram", "--spec-tokens", "3", "--spec-option", "prompt_lookup_min=1")


def outputs_of(result):
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["outputs"]


def test_json_tells_tokens_and_their_sources(invoke, tiny_model):
    arguments = ("generate", "-m", tiny_model, "-p", "abab", "-p", "zz", "--max-tokens", "30", "--json")
    plain = outputs_of(invoke(*arguments))
    drafted = outputs_of(invoke(*arguments, *NGRAM))
    assert [output["prompt"] for output in drafted] == ["abab", "zz"]
    for a, b in zip(plain, drafted, strict=True):
        assert (a["token_ids"], a["text"], a["finish_reason"]) == (
            b["token_ids"],
            b["text"],
            b["finish_reason"],
        )
        assert set(a["token_sources"]) == {"target"}
        assert len(b["token_sources"]) == len(b["token_ids"])
        assert b["token_sources"].count("draft") == b["metrics"]["accepted"] > 0


def test_seeded_sampling_is_the_same_with_and_without(invoke, tiny_model):
    arguments = (
        "generate", "-m", tiny_model, "-p", "abab", "--json", "--temperature", "0.8", "--top-p", "0.9",
        "--top-k", "50", "--min-p", "0.01", "--repetition-penalty", "1.1", "--max-tokens", "30",
    )  # fmt: skip
    runs = [
        outputs_of(invoke(*arguments, "--seed", seed, *more))
        for seed, more in [("3", ()), ("3", NGRAM), ("4", ())]
    ]
    first, second, third = (run[0]["token_ids"] for run in runs)
    assert first == second != third


def test_drafts_are_marked_and_nothing_else_changes(invoke, tiny_model):
    arguments = ("generate", "-m", tiny_model, "-p", "abab", "--max-tokens", "30", *NGRAM)
    bare, shown = invoke(*arguments), invoke(*arguments, "--show-drafts")
    assert bare.exit_code == shown.exit_code == 0
    assert "«" in shown.stdout and "«" not in bare.stdout
    assert shown.stdout.replace("«", "").replace("»", "") == bare.stdout
    assert "tokens were accepted drafts; acceptance length" in shown.stderr


def test_chat_puts_prompts_into_the_template(invoke, tiny_model):
    arguments = ("generate", "-m", tiny_model, "-p", "hi", "--json", "--max-tokens", "2")
    (plain,) = outputs_of(invoke(*arguments))
    (chat,) = outputs_of(invoke(*arguments, "--chat"))
    assert len(chat["prompt_token_ids"]) > len(plain["prompt_token_ids"])
    assert chat["prompt_token_ids"][0] == 1 and chat["prompt"] == "hi"


def test_a_prompt_from_stdin_and_a_stop(invoke, tiny_model):
    arguments = ("generate", "-m", tiny_model, "--json", "--max-tokens", "20")
    (free,) = outputs_of(invoke(*arguments, "-p", "abab"))
    stop = next(c for c in free["text"][3:] if c.isprintable())
    (stopped,) = outputs_of(invoke(*arguments, "-p", "-", "--stop", stop, input="abab"))
    assert stopped["prompt"] == "abab" and stopped["stop_reason"] == stop
    assert stopped["text"] == free["text"].split(stop)[0]


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("-p", "a", "--show-drafts"), 1, "--show-drafts has nothing to show without speculation"),
        ((), 2, "--prompt"),
        (("-p", "a", "--temperature", "nan"), 1, "temperature"),
        (("-p", "a", "--spec-method", "ngrma", "--spec-tokens", "3"), 1, "ngram"),
        (("-p", "a", "--spec-method", "ngram"), 1, "speculative_config.num_speculative_tokens is required"),
        (("-p", "a", *NGRAM[:3], "0"), 1, "speculative_config.num_speculative_tokens must be between 1"),
    ],
)  # fmt: skip
def test_wrong_options_end_with_one_clear_message(invoke, tiny_model, arguments, status, message):
    result = invoke("generate", "-m", tiny_model, *arguments)
    assert result.exit_code == status
    assert message in result.stderr and not result.stdout
    assert "Traceback" not in result.stderr
