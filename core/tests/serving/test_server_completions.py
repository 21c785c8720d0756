"""The real ``openai`` client against a server: completions, streamed and not, equal to what LLM gives."""

from __future__ import annotations

import json

import pytest
from specdecode import LLM, SamplingParams

openai = pytest.importorskip("openai")

PROMPT = "one two one two one two "
LOOSE = {"ignore_eos": True}


@pytest.fixture(scope="module")
def plain(serving_model):
    """Outputs without speculation."""
    with LLM(str(serving_model), dtype="float32", device="cpu") as llm:
        yield lambda prompt, **fields: llm.generate(prompt, SamplingParams(**fields), use_tqdm=False)[0]


def test_models(client):
    (model,) = client.models.list().data
    assert model.id == "tiny" and model.max_model_len == 1024
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_completion_is_what_the_plain_llm_gives(client, plain, temperature):
    fields = {"temperature": temperature, "seed": 5, "max_tokens": 60}
    wanted = plain(PROMPT, **fields, ignore_eos=True)
    got = client.completions.create(model="tiny", prompt=PROMPT, **fields, extra_body=LOOSE)
    assert got.id.startswith("cmpl-") and got.object == "text_completion" and got.model == "tiny"
    (choice,) = got.choices
    assert choice.text == wanted.outputs[0].text and choice.finish_reason == "length"
    assert got.usage.completion_tokens == 60
    assert got.usage.prompt_tokens == len(wanted.prompt_token_ids)
    assert got.usage.total_tokens == got.usage.prompt_tokens + 60


def test_usage_tells_of_drafts(client):
    def ask(**more):
        body = LOOSE | more
        got = client.completions.create(
            model="tiny", prompt=PROMPT, temperature=0, max_tokens=200, extra_body=body
        )
        return got.choices[0].text, got.usage.speculation

    text, full = ask()
    assert full["drafted_tokens"] >= full["accepted_tokens"] > 0
    assert 1 < full["acceptance_length"] <= 5
    assert full["steps"] < 199
    one_text, one = ask(speculation=1)
    assert one_text == text and one["acceptance_length"] <= 2 and one["drafted_tokens"] == one["draft_steps"]
    for off in (False, 0):
        off_text, none = ask(speculation=off)
        assert off_text == text and none["drafted_tokens"] == 0 and none["acceptance_length"] is None


def test_streamed_pieces_are_the_whole(client):
    fields = {"model": "tiny", "prompt": PROMPT, "temperature": 0.7, "seed": 3, "max_tokens": 50, "n": 3}
    whole = client.completions.create(**fields, extra_body=LOOSE)
    texts, finishes, usage = {0: "", 1: "", 2: ""}, {}, None
    stream = client.completions.create(
        **fields, stream=True, stream_options={"include_usage": True}, extra_body=LOOSE
    )
    for chunk in stream:
        if chunk.usage is not None:
            assert chunk.choices == []
            usage = chunk.usage
        for choice in chunk.choices:
            assert choice.index not in finishes
            texts[choice.index] += choice.text
            if choice.finish_reason:
                finishes[choice.index] = choice.finish_reason
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert len(set(texts.values())) == 3
    assert finishes == dict.fromkeys(range(3), "length")
    assert usage.completion_tokens == whole.usage.completion_tokens == 150


def test_several_prompts_and_token_ids(client, plain):
    ids = [101, 102, 103, 104, 101, 102]
    fields = {"temperature": 0.0, "max_tokens": 12}
    wanted = [plain(p, **fields).outputs[0].text for p in (PROMPT, "other text")]
    got = client.completions.create(model="tiny", prompt=[PROMPT, "other text"], n=2, **fields)
    assert [choice.text for choice in got.choices] == [wanted[0]] * 2 + [wanted[1]] * 2
    assert [choice.index for choice in got.choices] == [0, 1, 2, 3]
    of_ids = plain({"prompt_token_ids": ids}, **fields).outputs[0].text
    assert client.completions.create(model="tiny", prompt=ids, **fields).choices[0].text == of_ids
    both = client.completions.create(model="tiny", prompt=[ids, ids[:3]], **fields)
    assert both.choices[0].text == of_ids and len(both.choices) == 2
    streamed = ["", ""]
    for chunk in client.completions.create(
        model="tiny", prompt=[PROMPT, "other text"], stream=True, **fields
    ):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == wanted


def test_stop_and_its_reason(client, plain):
    text = plain(PROMPT, temperature=0.0, max_tokens=40, ignore_eos=True).outputs[0].text
    stop = text[10:12]
    got = client.completions.create(
        model="tiny", prompt=PROMPT, temperature=0, max_tokens=40, stop=[stop], extra_body=LOOSE
    ).choices[0]
    assert got.text == text[: text.index(stop)]
    assert got.finish_reason == "stop" and got.stop_reason == stop


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_and_echo(client, plain, stream, index):
    fields = {"temperature": 0.0, "max_tokens": 6}
    wanted = plain(PROMPT, **fields, logprobs=2, prompt_logprobs=2)
    made = client.completions.create(
        model="tiny", prompt=PROMPT, logprobs=2, echo=True, stream=stream, n=2, **fields
    )
    choices = [choice for chunk in (made if stream else [made]) for choice in chunk.choices]
    mine = [choice for choice in choices if choice.index == index]
    text = "".join(choice.text for choice in mine)
    assert text == PROMPT + wanted.outputs[0].text
    parts = [choice.logprobs for choice in mine]
    told = [value for part in parts for value in part.token_logprobs]
    rows = [*wanted.prompt_logprobs, *wanted.outputs[0].logprobs]
    ids = [*wanted.prompt_token_ids, *wanted.outputs[0].token_ids]
    assert told[0] is None
    assert told[1:] == pytest.approx([row[id].logprob for id, row in zip(ids[1:], rows[1:], strict=True)])
    offsets = [value for part in parts for value in part.text_offset]
    tokens = [value for part in parts for value in part.tokens]
    whole = [(place, token) for place, token in zip(offsets, tokens, strict=True) if "\ufffd" not in token]
    assert len(whole) > len(PROMPT) and all(text[place:].startswith(token) for place, token in whole)
    assert "".join(tokens[: len(PROMPT)]) == PROMPT
    assert all(2 <= len(top) <= 3 for part in parts for top in part.top_logprobs if top is not None)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [None, 0, 2])
def test_the_prompt_alone(client, plain, stream, logprobs):
    """As evaluation harnesses score prompts."""
    prompts = [PROMPT, PROMPT[:7]]
    made = client.completions.create(
        model="tiny", prompt=prompts, max_tokens=0, echo=True, logprobs=logprobs, stream=stream, n=2,
        temperature=0, stop=[chr(code) for code in range(32, 127)],
        extra_body={"token_sources": True}, **({"stream_options": {"include_usage": True}} if stream else {}),
    )  # fmt: skip
    chunks = list(made) if stream else [made]
    choices = sorted((choice for chunk in chunks for choice in chunk.choices), key=lambda c: c.index)
    assert [choice.text for choice in choices] == [PROMPT, PROMPT, PROMPT[:7], PROMPT[:7]]
    assert {choice.finish_reason for choice in choices} == {"length"}
    assert all(choice.token_sources == [] and "stop_reason" not in choice.model_extra for choice in choices)
    usage = chunks[-1].usage
    assert (usage.completion_tokens, usage.prompt_tokens) == (0, len(PROMPT) + 7)
    for choice in choices:
        if logprobs is None:
            assert choice.logprobs is None
            continue
        wanted = plain(choice.text, max_tokens=1, prompt_logprobs=logprobs)
        rows = zip(wanted.prompt_token_ids[1:], wanted.prompt_logprobs[1:], strict=True)
        assert "".join(choice.logprobs.tokens) == choice.text
        assert choice.logprobs.token_logprobs[0] is None
        assert choice.logprobs.token_logprobs[1:] == pytest.approx([row[id].logprob for id, row in rows])
        assert len(choice.logprobs.top_logprobs) == len(choice.logprobs.text_offset) == len(choice.text)


def test_offsets_count_characters_that_take_several_tokens(client):
    prompt = "ñ€😀z"
    got = client.completions.create(
        model="tiny", prompt=prompt, echo=True, logprobs=0, max_tokens=1, temperature=0
    )
    offsets = got.choices[0].logprobs.text_offset
    assert offsets[:11] == [0, 0, 1, 1, 1, 2, 2, 2, 2, 3, 4]


@pytest.mark.parametrize(("keep", "told"), [(4, "two "), (len(PROMPT), PROMPT), (1000, PROMPT), (-1, PROMPT)])
def test_echo_of_a_prompt_that_was_cut(client, keep, told):
    got = client.completions.create(
        model="tiny", prompt=PROMPT, echo=True, logprobs=0, max_tokens=1, temperature=0,
        extra_body=LOOSE | {"truncate_prompt_tokens": keep},
    )  # fmt: skip
    (choice,) = got.choices
    assert choice.text.startswith(told) and got.usage.prompt_tokens == len(told)
    assert choice.text == "".join(choice.logprobs.tokens)


def test_nulls_are_as_if_left_out(served):
    """Clients of several languages send every field that they know."""
    from specdecode.serve.protocol import ChatRequest, CompletionRequest

    with served.http() as http:
        for path, model, body in (
            ("/v1/completions", CompletionRequest, {"prompt": PROMPT}),
            ("/v1/chat/completions", ChatRequest, {"messages": [{"role": "user", "content": "hi"}]}),
        ):
            given = body | {"max_tokens": 3, "temperature": 0}
            plain = http.post(path, json=given).json()["choices"]
            response = http.post(path, json=dict.fromkeys(model.model_fields) | given)
            assert response.status_code == 200 and response.json()["choices"] == plain, response.text
            options = {
                "stream": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": None},
            }
            assert '"usage"' in http.post(path, json=given | options).text
            unknown = http.post(path, json=given | {"temprature": None})
            assert unknown.status_code == 400 and "'temperature'" in unknown.json()["error"]["message"]


def test_token_sources_are_the_text(client):
    body = LOOSE | {"token_sources": True}
    fields = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 200}
    whole = client.completions.create(**fields, extra_body=body).choices[0]
    assert "".join(piece["text"] for piece in whole.token_sources) == whole.text
    assert {piece["source"] for piece in whole.token_sources} == {"draft", "target"}
    pieces = [
        piece
        for chunk in client.completions.create(**fields, stream=True, extra_body=body)
        for piece in chunk.choices[0].token_sources
    ]
    assert "".join(piece["text"] for piece in pieces) == whole.text
    of_draft = [
        "".join(p["text"] for p in ps if p["source"] == "draft") for ps in (pieces, whole.token_sources)
    ]
    assert of_draft[0] == of_draft[1]


@pytest.mark.parametrize(
    "body",
    [
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"enum": ["x", 7]}},
            }
        },
        {"structured_outputs": {"choice": ["red", "blue"]}},
        {"guided_regex": "[0-9]{3}"},
        {"guided_choice": ["red", "blue"]},
        {"guided_json": {"const": 3}},
        {"guided_grammar": 'start: "red" | "blue"'},
    ],
    ids=lambda body: next(iter(body)),
)
def test_structured_outputs(client, body):
    text = (
        client.completions.create(
            model="tiny", prompt=PROMPT, temperature=1, seed=1, max_tokens=40, extra_body=body
        )
        .choices[0]
        .text
    )
    assert text.strip() in {"red", "blue", '"x"', "7", "3"} or text.isdigit()


def test_a_salt_keeps_caches_apart(client):
    prompt = "a prompt of more than one block of sixteen tokens, as every letter is one"

    def cached(**more):
        got = client.completions.create(model="tiny", prompt=prompt, max_tokens=1, extra_body=more)
        return got.usage.prompt_tokens_details.cached_tokens

    assert cached(cache_salt="mine") == 0
    assert cached(cache_salt="theirs") == 0
    assert cached() == 0
    assert cached(cache_salt="mine") > 0


def test_events_are_as_the_protocol_has_them(served):
    with (
        served.http() as http,
        http.stream(
            "POST", "/v1/completions", json={"prompt": "a", "max_tokens": 3, "stream": True}
        ) as response,
    ):
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["x-request-id"].startswith("cmpl-")
        events = response.read().decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(
        json.loads(event.removeprefix("data: "))["object"] == "text_completion" for event in events[:-2]
    )
