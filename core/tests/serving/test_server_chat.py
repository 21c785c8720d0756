"""Chat through the real client: templates, reasoning and tool calls, in text the model is made to say."""

from __future__ import annotations

import json
import threading

import pytest
from specdecode import LLM, SamplingParams

openai = pytest.importorskip("openai")

HI = [{"role": "user", "content": "hi hi hi hi"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "tells the weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Ulm", "Rom"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if tools %}[tools]{% for t in tools %}{{ t.function.name }} {% endfor %}{% endif %}"
    "{% if add_generation_prompt %}[assistant]{% if think %}<think>\n{% elif think is false %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def parsing(llm, serve):
    return serve(llm, reasoning_parser="think", tool_call_parser="hermes", chat_template=TEMPLATE).client()


@pytest.fixture(scope="module")
def bare(llm, serve):
    """No parsers, and a template that shows the tools."""
    return serve(llm, chat_template=TEMPLATE).client()


@pytest.fixture(scope="module")
def json_calls(llm, serve):
    return serve(llm, tool_call_parser="json", chat_template=TEMPLATE).client()


def say(client, text, *, stream=False, **more):
    """A chat whose answer is ``text``: the client's message, or the sum of what it was streamed."""
    body = {"structured_outputs": {"choice": [text]}, **more.pop("extra_body", {})}
    asked = {"model": "tiny", "messages": HI, "max_completion_tokens": 400, "extra_body": body} | more
    made = client.chat.completions.create(**asked, stream=stream)
    return summed(made) if stream else as_dict(made.choices[0])


def as_dict(choice):
    calls = [
        (call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls or ()
    ]
    return {
        "content": choice.message.content,
        "reasoning": getattr(choice.message, "reasoning_content", None),
        "calls": calls,
        "finish": choice.finish_reason,
    }


def summed(stream):
    got = {"content": None, "reasoning": None, "calls": [], "finish": None}
    for chunk in stream:
        for choice in chunk.choices:
            delta = choice.delta
            if delta.content:
                got["content"] = (got["content"] or "") + delta.content
            if thought := getattr(delta, "reasoning_content", None):
                got["reasoning"] = (got["reasoning"] or "") + thought
            for call in delta.tool_calls or ():
                assert call.index == len(got["calls"]) and call.id.startswith("call_")
                got["calls"].append((call.function.name, json.loads(call.function.arguments)))
            got["finish"] = choice.finish_reason or got["finish"]
    return got


def test_an_answer_is_what_llm_chat_gives(client, serving_model):
    with LLM(str(serving_model), dtype="float32", device="cpu") as plain:
        wanted = plain.chat(HI, SamplingParams(temperature=0.5, seed=4, max_tokens=30), use_tqdm=False)[0]
    fields = {"model": "tiny", "messages": HI, "temperature": 0.5, "seed": 4, "max_tokens": 30}
    got = client.chat.completions.create(**fields)
    assert got.choices[0].message.content == wanted.outputs[0].text
    assert got.choices[0].message.role == "assistant" and got.object == "chat.completion"
    assert got.usage.prompt_tokens == len(wanted.prompt_token_ids)
    chunks = list(client.chat.completions.create(**fields, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == wanted.outputs[0].text
    assert chunks[-1].choices[0].finish_reason == wanted.outputs[0].finish_reason


def test_without_a_length_it_goes_to_the_end_of_the_context(client):
    got = client.chat.completions.create(
        model="tiny", messages=HI, temperature=0, extra_body={"ignore_eos": True}
    )
    assert got.usage.total_tokens == 1024 and got.choices[0].finish_reason == "length"


def test_logprobs(client):
    got = client.chat.completions.create(
        model="tiny", messages=HI, temperature=0, max_tokens=5, logprobs=True, top_logprobs=3
    )
    content = got.choices[0].logprobs.content
    assert len(content) == got.usage.completion_tokens
    for entry in content:
        assert [top.logprob for top in entry.top_logprobs] == sorted(
            (top.logprob for top in entry.top_logprobs), reverse=True
        )
        assert len(entry.top_logprobs) == 3 and entry.top_logprobs[0].token == entry.token  # greedy
        assert bytes(entry.bytes).decode("utf-8", "replace") == entry.token
    chunks = client.chat.completions.create(
        model="tiny", messages=HI, temperature=0, max_tokens=5, logprobs=True, stream=True
    )
    parts = [c.choices[0].logprobs.content for c in chunks if c.choices[0].logprobs]
    streamed = [entry for part in parts for entry in part]
    assert [entry.logprob for entry in streamed] == pytest.approx([entry.logprob for entry in content])
    assert all(entry.top_logprobs == [] for entry in streamed)


def test_no_chunk_is_empty(client):
    """Each of several choices is silent while only others have something new."""
    made = client.chat.completions.create(
        model="tiny", messages=HI, temperature=1, seed=1, max_tokens=12, logprobs=True, n=3, stream=True
    )
    chunks = [chunk.choices[0] for chunk in made][3:]  # behind the roles
    assert all(chunk.delta.content or chunk.logprobs.content or chunk.finish_reason for chunk in chunks)


def test_bytes_of_tokens_make_up_characters(client, forced):
    said = "ñ€😀z"
    got = client.chat.completions.create(
        model="tiny", messages=HI, temperature=0, max_tokens=forced(said), logprobs=True
    )
    content = got.choices[0].logprobs.content
    assert got.choices[0].message.content == said
    assert bytes(byte for entry in content for byte in entry.bytes).decode() == said


def test_bytes_of_byte_tokens():
    from specdecode.engine.detokenize import token_bytes
    from specdecode.testing.word_tokenizer import CHARACTERS, byte_ids, word_tokenizer

    tokenizer = word_tokenizer()
    for character in CHARACTERS:
        ids = byte_ids(character, 300)
        assert (
            b"".join(token_bytes(tokenizer, id, tokenizer.decode([id])) for id in ids).decode() == character
        )


@pytest.fixture
def forced(llm, monkeypatch):
    """Have the model begin its answers with a text."""
    real = llm.engine.add_request

    def force(text):
        ids = llm.get_tokenizer()(text)["input_ids"]

        def first(output_ids, logits):
            if len(output_ids) < len(ids):
                logits[:] = -float("inf")
                logits[ids[len(output_ids)]] = 0.0
            return logits

        def add(request_id, prompt, params, **more):
            params = params.clone(logits_processors=[first])
            return real(request_id, prompt, params, **more)

        monkeypatch.setattr(llm.engine, "add_request", add)
        return len(ids)

    return force


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "reasoning", "content", "opened"),
    [
        ("<think>\none two\n</think>\n\nthree", "one two", "three", None),
        ("one two</think>three", "one two", "three", True),
        ("three", None, "three", False),
        ("no tags at all", None, "no tags at all", None),
        ("a <think> that comes late</think>", None, "a <think> that comes late</think>", None),
        ("<think>never ends <", "never ends <", "", None),
        ("<think>a < b </ c</think>d", "a < b </ c", "d", None),
        ("<thin", None, "<thin", None),
    ],
)
def test_reasoning(parsing, forced, text, reasoning, content, opened, stream):
    kwargs = {} if opened is None else {"chat_template_kwargs": {"think": opened}}
    body = {"structured_outputs": None} | kwargs
    got = say(parsing, "", stream=stream, max_completion_tokens=forced(text), extra_body=body)
    assert (got["content"] or "", got["reasoning"]) == (content, reasoning)
    body["include_reasoning"] = False
    got = say(parsing, "", stream=stream, max_completion_tokens=forced(text), extra_body=body)
    assert (got["content"] or "", got["reasoning"]) == (content, None)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("opened", "said"), [(True, "a } b</think>\n\n"), (None, "<think>{</think>"), (None, "")]
)
@pytest.mark.parametrize(
    ("structure", "fits"),
    [
        ({"json": {"const": {"a": 1}}}, lambda text: json.loads(text) == {"a": 1}),
        ({"json": {"const": 5}, "disable_any_whitespace": True}, lambda text: text == "5"),
        ({"regex": "x/[0-9]\\/y"}, lambda text: text[:2] + text[3:] == "x//y"),
        ({"choice": ["red", 'b"lue']}, lambda text: text in ("red", 'b"lue')),
        ({"grammar": 'start: a+\na: "p" | "q"\n'}, lambda text: set(text) <= {"p", "q"}),
        ({"grammar": 'root ::= "p" | "q"'}, lambda text: text in ("p", "q")),
        ({"json_object": True}, lambda text: text.lstrip().startswith("{")),
    ],
)
def test_a_structure_is_the_answers_and_reasoning_is_free(
    parsing, forced, structure, fits, opened, said, stream
):
    forced(said)
    kwargs = {} if opened is None else {"chat_template_kwargs": {"think": opened}}
    fields = {"temperature": 1.0, "seed": 3, "max_completion_tokens": 80}
    got = say(parsing, "", stream=stream, extra_body=kwargs | {"structured_outputs": structure}, **fields)
    assert fits(got["content"]), got
    thought = said.removeprefix("<think>").split("</think>")[0]
    assert (got["reasoning"] or "") == (thought if said else "")


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_cannot_be_read(parsing, stream):
    for grammar in ("0", "root ::= (", "start: x }"):
        with pytest.raises(openai.BadRequestError, match=r"structured_outputs\.grammar"):
            say(parsing, "", stream=stream, extra_body={"structured_outputs": {"grammar": grammar}})


@pytest.mark.parametrize("stream", [False, True])
def test_no_reasoning_where_the_template_has_closed_it(parsing, stream):
    got = say(parsing, "yes", stream=stream, extra_body={"chat_template_kwargs": {"think": False}})
    assert (got["content"], got["reasoning"], got["finish"]) == ("yes", None, "stop")


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (CALL, None, [("weather", {"city": "Ulm"})]),
        (f"Let me see.\n{CALL}\n{CALL}", "Let me see.", [("weather", {"city": "Ulm"})] * 2),
        ("no call <tool", "no call <tool", []),
        ("<tool_call>\nno JSON\n</tool_call>", "<tool_call>\nno JSON\n</tool_call>", []),
        ('<tool_call>{"name": "clock"}', None, [("clock", {})]),
        ('<tool_call>{"name": "clo', '<tool_call>{"name": "clo', []),
    ],
)
def test_hermes_calls(llm, serve, text, content, calls, stream):
    client = _hermes(llm, serve)
    got = say(client, text, stream=stream, tools=[WEATHER, CLOCK])
    assert got["content"] == content and got["calls"] == calls
    assert got["finish"] == ("tool_calls" if calls else "stop")


_KNOWN = {}


def _hermes(llm, serve):
    if "client" not in _KNOWN:
        _KNOWN["client"] = serve(llm, tool_call_parser="hermes", chat_template=TEMPLATE).client()
    return _KNOWN["client"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('{"name": "clock", "parameters": {}}', None, [("clock", {})]),
        ('[{"name": "clock", "arguments": "{}"}, {"name": "weather", "arguments": {"city": "Rom"}}]', None,
         [("clock", {}), ("weather", {"city": "Rom"})]),
        ('{"city": "Rom"}', '{"city": "Rom"}', []),
        ("{not JSON", "{not JSON", []),
        ("  a text {", "  a text {", []),
    ],
)  # fmt: skip
def test_json_calls(json_calls, text, content, calls, stream):
    got = say(json_calls, text, stream=stream, tools=[WEATHER, CLOCK])
    assert got["content"] == content and got["calls"] == calls


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("which", ["hermes", "json_calls", "bare", "parsing"])
def test_a_call_that_is_asked_for_is_made(which, stream, request, llm, serve):
    client = _hermes(llm, serve) if which == "hermes" else request.getfixturevalue(which)
    kwargs = {"chat_template_kwargs": {"think": False}} if which == "parsing" else {}
    for choice, names in (
        ("required", {"weather", "clock"}),
        ({"type": "function", "function": {"name": "weather"}}, {"weather"}),
    ):
        got = say(
            client, "", stream=stream, tools=[WEATHER, CLOCK], tool_choice=choice, temperature=1.0, seed=9,
            parallel_tool_calls=False, extra_body={"structured_outputs": None} | kwargs,
            max_completion_tokens=900, logit_bias={str(ord("}") + 3): 20},
        )  # fmt: skip
        assert got["finish"] == "tool_calls" and not got["content"], got
        ((name, arguments),) = got["calls"]
        assert name in names
        assert name == "clock" or arguments in ({"city": "Ulm"}, {"city": "Rom"})


def test_tools_are_told_to_the_template(bare, llm):
    def prompt_tokens(**more):
        return bare.chat.completions.create(
            model="tiny", messages=HI, max_tokens=1, **more
        ).usage.prompt_tokens

    plain = prompt_tokens()
    assert prompt_tokens(tools=[WEATHER]) == plain + len("[tools]weather ")
    assert prompt_tokens(tools=[WEATHER], tool_choice="none") == plain


def test_a_conversation_with_calls_goes_on(bare):
    messages = [
        *HI,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "noon"},
    ]
    assert bare.chat.completions.create(model="tiny", messages=messages, max_tokens=2).choices


def test_continuing_a_message(bare):
    fields = {"model": "tiny", "max_tokens": 1}
    begun = [*HI, {"role": "assistant", "content": "It is"}]
    told = bare.chat.completions.create(messages=begun, extra_body={"continue_final_message": True}, **fields)
    assert told.usage.prompt_tokens == len("[user]hi hi hi hi[assistant]It is")


def test_a_structure_is_translated_beside_the_event_loop(parsing, monkeypatch):
    """Behind reasoning a grammar becomes part of another one, which takes a second for half a megabyte."""
    from specdecode.serve import chat

    translate, threads = chat.behind_reasoning, []

    def watched(*arguments):
        threads.append(threading.current_thread().name)
        return translate(*arguments)

    monkeypatch.setattr(chat, "behind_reasoning", watched)
    got = say(parsing, "", extra_body={"structured_outputs": {"grammar": 'root ::= "yes"'}}, temperature=0)
    assert got["content"] == "yes" or got["finish"] == "length"
    (thread,) = threads
    assert thread.startswith("specdecode-long-door")
