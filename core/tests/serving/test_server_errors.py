"""Whatever is wrong with a request is told in OpenAI's shape, and touches no other request."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

openai = pytest.importorskip("openai")

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


@pytest.fixture(scope="module")
def http(served):
    with served.http() as http:
        yield http


@pytest.mark.parametrize(
    ("body", "status", "says", "param"),
    [
        ({}, 400, "prompt: Field required", "prompt"),
        ({"prompt": "a", "model": "other"}, 404, "'other' is not served", "model"),
        ({"prompt": "a", "temprature": 1}, 400, "do you mean 'temperature'", "temprature"),
        ({"prompt": "a", "temperature": -1}, 400, "temperature must be a number between", "temperature"),
        ({"prompt": "a", "temperature": "hot"}, 400, "temperature", "temperature"),
        ({"prompt": "a", "n": 1.5}, 400, "n:", "n"),
        ({"prompt": 5}, 400, "prompt", "prompt"),
        ({"prompt": ["a", 5]}, 400, "prompt", "prompt"),
        ({"prompt": "a", "stop": 5}, 400, "stop", "stop"),
        ({"prompt": "a", "response_format": {"type": "xml"}}, 400, "response_format.type", "response_format"),
        ({"prompt": "a", "n": 300}, 400, "300 of 1 prompts are more than the 256 completions", None),
        (
            {"prompt": "a", "max_tokens": 0},
            400,
            "max_tokens must be an integer at least 1, or 0 with echo=true",
            "max_tokens",
        ),
        (
            {"prompt": "a", "max_tokens": 0, "echo": True, "min_tokens": 1},
            400,
            "min_tokens must be at most max_tokens=0, got 1",
            "min_tokens",
        ),
        ({"prompt": "a", "best_of": 3}, 400, "best_of is not supported", "best_of"),
        ({"prompt": "a", "suffix": "b"}, 400, "suffix is refused", "suffix"),
        ({"prompt": ""}, 400, "prompt is empty", "prompt"),
        ({"prompt": []}, 400, "empty list", "prompt"),
        ({"prompt": [5, 10**6]}, 400, "prompt_token_ids must be between 0 and 299", None),
        ({"prompt": "a" * 2000}, 400, "has 2000 tokens", None),
        ({"prompt": "a", "logit_bias": {"x": 1}}, 400, "token ids as keys", "logit_bias"),
        ({"prompt": "a", "logprobs": 10**9}, 400, "logprobs must be between 0 and 20", "logprobs"),
        (
            {"prompt": "a", "guided_regex": "("},
            400,
            "guided_regex: structured_outputs.regex='(' cannot be compiled",
            "guided_regex",
        ),
        (
            {"prompt": "a", "guided_choice": []},
            400,
            "guided_choice: structured_outputs.choice must be a list",
            "guided_choice",
        ),
        (
            {"prompt": "a", "structured_outputs": {"regex": "("}},
            400,
            "structured_outputs.regex='(' cannot",
            "structured_outputs",
        ),
        (
            {"prompt": "a", "guided_regex": "a" * 70_000},
            400,
            "guided_regex: structured_outputs.regex has 70000 characters",
            "guided_regex",
        ),
        ({"prompt": "a", "guided_regex": "a", "guided_choice": ["b"]}, 400, "keep one of them", None),
        ({"prompt": "a", "priority": 1}, 400, "scheduling_policy", "priority"),
        ({"prompt": "a", "seed": 2**64}, 400, "seed", "seed"),
        ({"prompt": "a", "response_format": {"type": "json_schema"}}, 400, "schema is missing", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_completions(http, body, status, says, param, stream):
    response = http.post("/v1/completions", json=({"stream": True} if stream and body else {}) | body)
    error = response.json()["error"]
    assert response.status_code == status and says in error["message"]
    assert error["type"] == "invalid_request_error"
    assert param is None or error["param"] == param


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content is missing"),
        ({"messages": [{"role": 3, "content": "a"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "'image_url', which is refused",
        ),
        ({"max_completion_tokens": 5}, "old name"),
        (
            {"max_tokens": None, "max_completion_tokens": 0},
            "max_completion_tokens must be an integer at least 1",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "objekt"}}}},
            "response_format: structured_outputs.json=",
        ),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "objekt"}}}],
                "tool_choice": "required",
            },
            "tools: structured_outputs.",
        ),
        ({"top_logprobs": 3}, "logprobs=true"),
        ({"logprobs": True, "top_logprobs": 21}, "between 0 and 20"),
        ({"tool_choice": "required"}, "wants tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "none of the tools"),
        ({"chat_template_kwargs": {"tokenize": True}}, "told it by other means"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "goes on with the last one"),
        ({"functions": []}, "functions is not a field"),
        ({"echo": True}, "echo is not a field that this server knows"),
        ({"messages": [{"role": "assistant", "tool_calls": 7}]}, "messages[0].tool_calls must be a list"),
        ({"messages": [{"role": "assistant", "tool_calls": {"a": 1}}]}, "tool_calls must be a list"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "[" * 100_000}}]}]},
            "tool_calls[0].function.arguments is not JSON",
        ),
    ],
)
def test_chat(http, change, says):
    response = http.post("/v1/chat/completions", json=CHAT | change)
    assert response.status_code == 400 and says in response.json()["error"]["message"]


def test_unknown_fields_name_what_the_endpoint_knows(http):
    of_chat = http.post("/v1/chat/completions", json=CHAT | {"echo": True}).json()["error"]
    assert "do you mean 'echo'" not in of_chat["message"]
    of_completions = http.post("/v1/completions", json={"prompt": "a", "top_logprobs": 1}).json()["error"]
    assert "do you mean 'logprobs'" in of_completions["message"]


NESTED = '{"items": ' * 600 + "{}" + "}" * 600


@pytest.mark.parametrize("text", [NESTED, "[" * 100_000, '{"const": ' + "1" * 5000 + "}"])
def test_schemas_that_are_hard_to_read(http, text):
    """As JSON and as JSON within a string."""
    bodies = [json.dumps({"prompt": "a", "guided_json": text})]
    if text is NESTED:
        schema = f'{{"type": "json_schema", "json_schema": {{"schema": {text}}}}}'
        bodies += [f'{{"prompt": "a", "{name}": {value}}}' for name, value in (
            ("guided_json", text), ("structured_outputs", f'{{"json": {text}}}'), ("response_format", schema),
        )]  # fmt: skip
    for body in bodies:
        response = http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
        assert response.status_code == 400, response.text
        assert "structured_outputs.json" in response.json()["error"]["message"]


def test_stream_options_want_a_stream(http):
    response = http.post("/v1/completions", json={"prompt": "a", "stream_options": {}})
    assert response.status_code == 400 and response.json()["error"]["param"] == "stream_options"


def test_all_faults_are_told_at_once(http):
    response = http.post("/v1/completions", json={"prompt": "a", "temperature": -1, "top_p": 3, "stop": ""})
    message = response.json()["error"]["message"]
    assert all(name in message for name in ("temperature", "top_p", "stop"))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"7", b'"a"', b"null", b"\xff\xfe", b"[" * 100_000])
def test_bodies_that_are_no_request(http, content):
    response = http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400 and response.json()["error"]["message"]


@pytest.mark.parametrize(
    "text", [b'{"prompt": "\\ud800"}', b'{"prompt": "a", "seed": NaN}',
             b'{"prompt": "a", "cache_salt": "\\ud800"}', b'{"prompt": "a", "\\ud800": 1}',
             b'{"prompt": "a", "structured_outputs": {"json": {"const": "\\ud800"}}}',
             b'{"prompt": "a", "temperature": 1e999}', b'{"prompt": "a", "top_k": 1e30}']
)  # fmt: skip
def test_json_that_is_hard_to_read(http, text):
    response = http.post("/v1/completions", content=text, headers={"content-type": "application/json"})
    assert response.status_code == 400 and response.json()["error"]["message"]


@pytest.mark.parametrize(
    "message", [b'{"role": "user", "content": "\\ud800"}', b'{"role": "\\ud800", "content": "a"}']
)
def test_half_a_character_in_a_conversation(http, message):
    content = b'{"messages": [%s]}' % message
    response = http.post(
        "/v1/chat/completions", content=content, headers={"content-type": "application/json"}
    )
    assert response.status_code == 400 and response.json()["error"]["param"] == "messages"


def test_unknown_routes_and_methods(http):
    for response in (http.get("/v1/nothing"), http.get("/v1/completions"), http.delete("/metrics")):
        assert response.status_code in (404, 405)
        assert response.json()["error"]["type"] == "invalid_request_error"


def test_the_client_raises_its_own_errors(client):
    with pytest.raises(openai.BadRequestError, match="temperature must be"):
        client.completions.create(model="tiny", prompt="a", temperature=-3)
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.chat.completions.create(model="gpt-4", messages=[{"role": "user", "content": "hi"}])


# -- limits ----------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def narrow(llm, serve):
    return serve(llm, max_body_bytes=1000, max_waiting=2, body_timeout=0.3)


def test_bodies_that_are_too_large(narrow):
    with narrow.http() as http:
        large = http.post("/v1/completions", json={"prompt": "a" * 1000})
        assert large.status_code == 413 and "1000 bytes" in large.json()["error"]["message"]

        def chunks():
            for _ in range(50):
                yield b" " * 100

        chunked = http.post("/v1/completions", content=chunks(), headers={"content-type": "application/json"})
        assert chunked.status_code == 413


def test_a_body_that_does_not_come(narrow):
    with socket.create_connection(("127.0.0.1", narrow.port), timeout=5) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 20\r\n\r\n{")
        assert b" 408 " in raw.recv(1000)


def test_too_many_open_requests(narrow):
    async def main():
        async with openai.AsyncOpenAI(base_url=f"{narrow.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(
                *(
                    client.completions.create(
                        model="tiny", prompt="a", max_tokens=60, extra_body={"ignore_eos": True}
                    )
                    for _ in range(6)
                ),
                return_exceptions=True,
            )

    results = asyncio.run(main())
    refused = [one for one in results if isinstance(one, openai.RateLimitError)]
    assert refused and len(refused) < 6
    assert refused[0].response.headers["retry-after"]
    narrow.wait_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long(llm, serve, stream):
    impatient = serve(llm, request_timeout=0.05)
    body = {"prompt": ["a", "b"], "max_tokens": 900, "ignore_eos": True, "temperature": 0, "stream": stream}
    with impatient.http() as http:
        response = http.post("/v1/completions", json=body)
    if stream:
        assert response.status_code == 200 and '"type":"timeout_error"' in response.text
    else:
        assert response.status_code == 504 and response.json()["error"]["type"] == "timeout_error"
    impatient.wait_idle()


# -- keys ------------------------------------------------------------------------------------------
def test_keys_have_caches_of_their_own(llm, serve):
    from specdecode.serve.settings import read_keys

    served = serve(llm, api_keys=read_keys(["alice-key", "bob-key"], None))
    prompt = "what one of them asked, and what the other one is not to be shown by its latency"

    def cached(key):
        got = served.client(key).completions.create(model="tiny", prompt=prompt, max_tokens=1)
        return got.usage.prompt_tokens_details.cached_tokens

    assert [cached("alice-key"), cached("bob-key")] == [0, 0]
    assert cached("alice-key") > 0
    for key in ("mallory", "alice-key2", ""):
        with pytest.raises((openai.AuthenticationError, openai.OpenAIError)):
            cached(key)
    with served.http() as http:
        assert http.get("/v1/models").status_code == 401
        assert http.get("/v1/models", headers={"authorization": "Basic alice-key"}).status_code == 401
        assert http.get("/specdecode/info").status_code == 401
        assert http.get("/health").status_code == http.get("/").status_code == 200
        assert "alice-key" not in http.get("/metrics").text


def test_key_files(tmp_path):
    from specdecode.contract import ConfigError
    from specdecode.serve.settings import read_keys

    path = tmp_path / "keys"
    path.write_text("one  # Alice\n\n# nobody\ntwo\n")
    assert [key.secret for key in read_keys(["zero"], path)] == ["zero", "one", "two"]
    assert "zero" not in repr(read_keys(["zero"], None))
    path.write_text("# none\n")
    for given in ([], path), (["a b"], None), ([""], None), ([], tmp_path / "missing"):
        with pytest.raises(ConfigError):
            read_keys(*given)


def test_a_long_conversation_holds_up_only_its_like(http, monkeypatch):
    import threading

    from specdecode.api.door import LONG
    from specdecode.serve import chat

    begun, go, real = threading.Event(), threading.Event(), chat.chat_prompt

    def slowly(tokenizer, messages, options, **keywords):
        if len(messages[0]["content"]) >= LONG:
            begun.set()
            assert go.wait(30)
        return real(tokenizer, messages, options, **keywords)

    monkeypatch.setattr(chat, "chat_prompt", slowly)
    answers = []
    long = {"messages": [{"role": "user", "content": "a" * LONG}]}
    other = threading.Thread(target=lambda: answers.append(http.post("/v1/chat/completions", json=long)))
    other.start()
    assert begun.wait(30)
    assert http.post("/v1/chat/completions", json=CHAT).status_code == 200
    assert not answers
    go.set()
    other.join(30)
    assert answers[0].status_code == 400 and "tokens" in answers[0].json()["error"]["message"]


@pytest.mark.parametrize("field", ["echo", "token_sources"])
def test_what_wants_a_tokenizer_and_has_none(make_llm, serve, field):
    llm = make_llm(skip_tokenizer_init=True)
    try:
        with serve(llm).http() as http:
            body = {"prompt": [5, 6], "max_tokens": 1, "temperature": 0}
            assert http.post("/v1/completions", json=body).status_code == 200
            response = http.post("/v1/completions", json=body | {field: True})
            assert response.status_code == 400 and response.json()["error"]["param"] == field
    finally:
        llm.shutdown()
