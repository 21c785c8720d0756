"""Conversations to prompts: what the template is given, and what is refused by name."""

from __future__ import annotations

import json

import pytest
from specdecode.api.chat import ChatOptions, chat_prompt, chat_prompts
from specdecode.contract import ConfigError
from specdecode.testing.tiny import tiny_checkpoint

HI = {"role": "user", "content": "hi"}

#: Shows what it is given.
SPY = "{{ messages | tojson }}|{{ tools | tojson }}|{{ add_generation_prompt }}|{{ mood }}"
LOOPING = (
    "{% for m in messages %}{% for p in m['content'] %}[{{ p.type }}:{{ p.text }}]{% endfor %}{% endfor %}"
)
LOOPING_NAMED = (
    "{% for m in messages %}{% set c = m.content %}{% for p in c %}<{{ p.text }}>{% endfor %}{% endfor %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


def text(tokenizer, conversation, **options):
    return chat_prompt(tokenizer, conversation, ChatOptions(**options))["prompt"]


def spied(tokenizer, conversation, **options):
    shown = text(tokenizer, conversation, chat_template=SPY, **options)
    messages, tools, generation, mood = shown.split("|")
    return json.loads(messages), json.loads(tools), generation == "True", mood


def test_the_prompt_is_the_tokenizers_template_with_its_special_tokens_once(tokenizer):
    prompt = chat_prompt(tokenizer, [{"role": "system", "content": "s"}, HI], ChatOptions())
    assert prompt["prompt"] == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = prompt["prompt_token_ids"]
    assert [token for token in ids if token < 3] == [1, 2, 1, 2, 1]
    assert tokenizer.decode(ids) == prompt["prompt"]


def test_the_generation_prompt_and_going_on_with_the_last_message(tokenizer):
    begun = [HI, {"role": "assistant", "content": "Well"}]
    assert text(tokenizer, begun, add_generation_prompt=False).endswith("assistant\nWell<|im_end|>\n")
    going_on = text(tokenizer, begun, add_generation_prompt=False, continue_final_message=True)
    assert going_on.endswith("assistant\nWell")


def test_tools_and_further_variables_reach_the_template(tokenizer):
    tools = [{"type": "function", "function": {"name": "now", "parameters": {}}}]
    _, given, generation, mood = spied(tokenizer, [HI], tools=tools, template_kwargs={"mood": "calm"})
    assert (given, generation, mood) == (tools, True, "calm")
    assert spied(tokenizer, [HI], add_generation_prompt=False)[1:3] == (None, False)


def test_a_function_may_be_a_tool(tokenizer):
    def add(a: int) -> int:
        """Add one.

        Args:
            a: a number
        """
        return a + 1

    _, (tool,), *_ = spied(tokenizer, [HI], tools=[add])
    assert tool["function"]["name"] == "add" and "a" in tool["function"]["parameters"]["properties"]


@pytest.mark.parametrize(
    ("content", "flat"),
    [
        ("hi", "hi"),
        ([{"type": "text", "text": "hi"}, {"type": "text", "text": "there"}], "hi\nthere"),
        (
            [{"text": "a"}, "b", {"type": "input_text", "text": "c"}, {"type": "refusal", "refusal": "d"}],
            "a\nb\nc\nd",
        ),
        ([], ""),
        ("", ""),
    ],
)
def test_text_parts_are_flattened(tokenizer, content, flat):
    message = {"role": "user", "content": content, "name": "Ada"}
    for format in ("auto", "string"):
        (given,), *_ = spied(tokenizer, [message], content_format=format)
        assert given == {"role": "user", "content": flat, "name": "Ada"}
    assert message["content"] == content


@pytest.mark.parametrize("template", [LOOPING, LOOPING_NAMED])
def test_a_template_that_loops_over_parts_gets_parts(tokenizer, template):
    message = {"role": "user", "content": ["a", "b"]}
    shown = text(tokenizer, [HI, message], chat_template=template)
    assert shown in ("[text:hi][text:a][text:b]", "<hi><a><b>")


def test_the_content_format_may_be_said(tokenizer):
    (given,), *_ = spied(tokenizer, [HI], content_format="openai")
    assert given["content"] == [{"type": "text", "text": "hi"}]
    # Text where parts are looked for: letters, which have neither type nor text.
    assert text(tokenizer, [HI], chat_template=LOOPING, content_format="string") == "[:][:]"


def test_arguments_of_tool_calls_become_mappings(tokenizer):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    bare = {"function": {"name": "g", "arguments": ""}}
    done = {"function": {"name": "h", "arguments": {"b": 2}}}
    messages = [HI, {"role": "assistant", "content": None, "tool_calls": [call, bare, done]},
                {"role": "tool", "tool_call_id": "1", "content": "3"}]  # fmt: skip
    (_, assistant, tool), *_ = spied(tokenizer, messages)
    assert assistant["content"] == ""
    assert [c["function"]["arguments"] for c in assistant["tool_calls"]] == [{"a": 1}, {}, {"b": 2}]
    assert tool["tool_call_id"] == "1" and call["function"]["arguments"] == '{"a": 1}'


@pytest.mark.parametrize(
    ("conversation", "message"),
    [
        ([], "messages must be a list of messages, got []"),
        ("hi", "messages must be a list of messages, got 'hi'"),
        (["hi"], "messages[0] must be a mapping with role and content, got 'hi'"),
        ([{"content": "hi"}], "messages[0].role must be a name such as 'user', got None"),
        ([HI, {"role": "user"}], "messages[1].content is missing"),
        ([{"role": "user", "content": 3}], "messages[0].content must be a text or a list of parts"),
        ([{"role": "user", "content": [3]}], "messages[0].content[0] must be a text part"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text must be a text"),
        *[
            ([{"role": "user", "content": ["x", {"type": kind, kind: {}}]}],
             f"messages[0].content[1] is of type {kind!r}, which is refused: only text and images are")
            for kind in ("input_audio", "video_url", "image_embeds", "file")
        ],
        *[
            ([{"role": "user", "content": ["x", {"type": kind, kind: {}}]}],
             f"messages[0].content[1] is of type {kind!r}, which is refused: this model takes text only")
            for kind in ("image_url", "input_image", "image_pil")
        ],
        ([{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}],
         "messages[0].tool_calls[0].function.arguments is not JSON"),
        ([{"role": "assistant", "tool_calls": ["f"]}], "messages[0].tool_calls[0] must be a mapping"),
    ],
)  # fmt: skip
def test_a_wrong_message_is_named(tokenizer, conversation, message):
    with pytest.raises(ConfigError) as caught:
        chat_prompt(tokenizer, conversation, ChatOptions())
    assert message in str(caught.value)


def test_all_wrong_messages_are_told_at_once(tokenizer):
    with pytest.raises(ConfigError) as caught:
        chat_prompt(tokenizer, [{"role": "user"}, HI, {}], ChatOptions())
    assert [fault.split(" ")[0] for fault in caught.value.faults] == [
        "messages[0].content",
        "messages[2].role",
    ]


def test_what_the_template_refuses_is_told(tokenizer):
    strict = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('begin with the user') }}{% endif %}"
    with pytest.raises(ConfigError, match=r"messages: the chat template refuses it: .*begin with the user"):
        chat_prompt(tokenizer, [{"role": "system", "content": "s"}], ChatOptions(chat_template=strict))
    with pytest.raises(ConfigError, match="the chat template refuses it"):
        chat_prompt(tokenizer, [HI], ChatOptions(chat_template="{% for %}"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"content_format": "json"},
            "chat_template_content_format must be one of auto, string, openai, got 'json'",
        ),
        ({"continue_final_message": True}, "set add_generation_prompt=False"),
        ({"tools": "f"}, "tools must be a list of JSON schemas or functions, got 'f'"),
        ({"template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize is refused"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ConfigError) as caught:
        ChatOptions(**options)
    assert message in str(caught.value)


def test_one_conversation_or_a_list_of_them(tokenizer):
    other = [{"role": "user", "content": "ho"}]
    one, two = (chat_prompt(tokenizer, c, ChatOptions()) for c in ([HI], other))
    assert chat_prompts(tokenizer, [HI], ChatOptions()) == [one]
    assert chat_prompts(tokenizer, [[HI], other], ChatOptions()) == [one, two]
    for wrong in ([], "hi", None, {"role": "user", "content": "x"}):
        with pytest.raises(ConfigError, match="messages must be a list of messages such as"):
            chat_prompts(tokenizer, wrong, ChatOptions())
    with pytest.raises(ConfigError, match=r"messages\[1\]\[0\]\.role"):
        chat_prompts(tokenizer, [[HI], [{"content": "x"}]], ChatOptions())


def test_a_tokenizer_and_a_template_are_wanted(tokenizer):
    from types import SimpleNamespace

    with pytest.raises(ConfigError, match="skip_tokenizer_init=True left none"):
        chat_prompt(None, [HI], ChatOptions())
    with pytest.raises(ConfigError, match="has no chat template: give chat_template"):
        chat_prompt(SimpleNamespace(chat_template=None), [HI], ChatOptions())
