"""What of images is refused, and how conversations bring them: LLM.chat, AsyncLLM and the server."""

from __future__ import annotations

import asyncio
import base64
import functools
import http.server
import io
import sys
import threading

import pytest
from specdecode import LLM, AsyncLLM, EngineArgs, SamplingParams
from specdecode.contract import ConfigError, SpecdecodeError
from specdecode.testing.tiny_vision import IMAGE_ID, tiny_image

PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
IMAGE = tiny_image(0)


def encoded(image=IMAGE) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def data_url(content=None) -> str:
    return "data:image/png;base64," + base64.b64encode(content or encoded()).decode()


def answer(llm, prompt):
    return llm.generate(prompt, PARAMS, use_tqdm=False)[0].outputs[0].token_ids


def user(*parts):
    return [{"role": "user", "content": list(parts)}]


def image_url(url):
    return {"type": "image_url", "image_url": {"url": url}}


# -- at the door ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"prompt": "<image>", "multi_modal_data": {"image": [IMAGE] * 2}}, "has 2 images, and the prompt 1"),
        ({"prompt": "no place", "multi_modal_data": {"image": IMAGE}}, "placeholders '<image>'"),
        ({"prompt": "<image>", "multi_modal_data": {"video": [1]}}, r"\['video'\] is refused"),
        ({"prompt": "<image>", "multi_modal_data": {"audio": 1}}, r"multi_modal_data\['audio'\] is refused"),
        ({"prompt": "<image>", "multi_modal_data": {"image": "x.png"}}, r"\['image'\]\[0\] must be a PIL"),
        ({"prompt": "<image>", "multi_modal_data": IMAGE}, "multi_modal_data must be a mapping"),
        ({"prompt": "<image>" * 3, "multi_modal_data": {"image": [IMAGE] * 3}}, "_per_prompt allows 2"),
        ({"prompt": "<image>" * 2, "multi_modal_data": {"image": [IMAGE] * 2}}, "at most 99"),
        ({"prompt": "<image>", "multi_modal_uuids": {"image": ["a"]}}, "multi_modal_uuids is refused"),
        ({"prompt": "<image>", "prompt_embeds": 1}, "prompt_embeds is refused"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_named(engine, prompt, message):
    llm = engine(limit_mm_per_prompt={"image": 2}, max_model_len=100)
    with pytest.raises(ConfigError, match=message):
        llm.generate(prompt, PARAMS, use_tqdm=False)


def test_an_image_is_not_cut(engine):
    prompt = {"prompt": "<image> and", "multi_modal_data": {"image": IMAGE}}
    with pytest.raises(ConfigError, match="truncate_prompt_tokens=20 would cut"):
        engine().generate(prompt, PARAMS.clone(truncate_prompt_tokens=20), use_tqdm=False)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"image": -1}, "limit_mm_per_prompt.*from 0 on"),
        ({"video": 1}, "limit_mm_per_prompt.*asks for video inputs"),
        ({"picture": 1}, "limit_mm_per_prompt.*must have keys of image"),
        ({"image": "two"}, "limit_mm_per_prompt"),
    ],
)
def test_limits_are_checked(limits, message):
    with pytest.raises(ConfigError, match=message):
        EngineArgs("x", limit_mm_per_prompt=limits)
    assert EngineArgs("x", limit_mm_per_prompt={"image": 3, "video": 0}).limit_mm_per_prompt["image"] == 3


def test_a_model_that_takes_text_only_says_so(engine, draft):
    prompt = {"prompt": "<image>", "multi_modal_data": {"image": IMAGE}}
    with LLM(str(draft), dtype="float32", device="cpu") as llm:
        for given in (lambda: llm.generate(prompt), lambda: llm.chat(user(image_url(data_url())))):
            with pytest.raises(ConfigError, match="takes text only; use one with a vision tower"):
                given()
    text = engine(limit_mm_per_prompt={"image": 0})
    assert text.llm_engine.core.runner.images is None
    with pytest.raises(ConfigError, match="takes text only"):
        text.generate(prompt, PARAMS, use_tqdm=False)
    assert answer(text, "plain") == answer(engine(), "plain")


def test_images_want_a_tokenizer(smolvlm):
    with pytest.raises(SpecdecodeError, match="leave skip_tokenizer_init out"):
        LLM(str(smolvlm), device="cpu", skip_tokenizer_init=True)


def test_without_a_processor_the_remedy_is_told(smolvlm, tmp_path):
    for file in smolvlm.iterdir():
        if file.name != "preprocessor_config.json":
            (tmp_path / file.name).symlink_to(file)
    with pytest.raises(ConfigError, match=r"preprocessor_config.json, or set limit_mm_per_prompt="):
        LLM(str(tmp_path), device="cpu")


def test_without_pillow_the_remedy_is_told(smolvlm, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ConfigError, match=r"'specdec-core\[images\]', or set limit_mm_per_prompt="):
        LLM(str(smolvlm), device="cpu")
    with LLM(str(smolvlm), dtype="float32", device="cpu", limit_mm_per_prompt={"image": 0}) as llm:
        assert len(answer(llm, "plain")) == 6


def test_weights_are_not_replaced_in_place(engine, smolvlm):
    with pytest.raises(ConfigError, match="takes images, and the weights of such models are not replaced"):
        engine().update_weights(str(smolvlm))


def test_dummy_weights(smolvlm):
    with LLM(str(smolvlm), dtype="float32", device="cpu", load_format="dummy") as llm:
        prompt = {"prompt": "<image>", "multi_modal_data": {"image": IMAGE}}
        assert len(llm.generate(prompt, PARAMS, use_tqdm=False)[0].outputs[0].token_ids) == 6


# -- conversations ----------------------------------------------------------------------------------
def test_chat_puts_images_where_the_template_has_them(engine):
    llm = engine()
    conversation = [
        *user({"type": "text", "text": "look: "}, image_url(data_url()), "and"),
        {"role": "assistant", "content": "seen"},
        *user({"type": "image_pil", "image_pil": IMAGE}, {"type": "input_image", "image_url": data_url()}),
    ]
    (output,) = llm.chat(conversation, PARAMS, use_tqdm=False)
    assert output.prompt.count("<image>") == 3
    images = [IMAGE.convert("RGB")] * 3
    wanted = llm.generate(
        {
            "prompt_token_ids": llm.get_tokenizer()(output.prompt, add_special_tokens=False).input_ids,
            "multi_modal_data": {"image": images},
        },
        PARAMS,
        use_tqdm=False,
    )[0]
    assert output.prompt_token_ids == wanted.prompt_token_ids
    assert output.prompt_token_ids.count(IMAGE_ID) == 3 * 5 * 4
    assert output.outputs[0].token_ids == wanted.outputs[0].token_ids


def test_a_template_may_be_beside_the_tokenizer(smolvlm, tmp_path):
    from specdecode.models import load_tokenizer, resolve_model

    for file in smolvlm.iterdir():
        if file.name not in ("chat_template.jinja", "tokenizer_config.json"):
            (tmp_path / file.name).symlink_to(file)
    (tmp_path / "chat_template.json").write_text('{"chat_template": "{{ messages[0].content }}"}')
    assert load_tokenizer(resolve_model(tmp_path)).chat_template == "{{ messages[0].content }}"


def test_a_template_of_strings_gets_placeholders(engine):
    (output,) = engine().chat(
        user(image_url(data_url()), "what?"),
        PARAMS,
        use_tqdm=False,
        chat_template="{{ messages[0].content }}",
    )
    assert output.prompt == "<image>\nwhat?" and IMAGE_ID in output.prompt_token_ids


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (image_url("https://example.org/a.png"), "names the host 'example.org', and nothing is fetched"),
        (image_url("file:///etc/passwd"), "local files are not read"),
        (image_url("ftp://example.org/a.png"), "must be a data: URL"),
        (image_url("data:image/png,abc"), "must be data:image"),
        (image_url("data:image/png;base64,a%"), "is not base64"),
        (image_url(data_url(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")), "is no image of PNG"),
        (image_url(data_url(b"no image")), "is no image of PNG, "),
        (image_url(data_url(encoded()[:200])), "that can be read"),
        ({"type": "image_url"}, "image_url must be a URL"),
        ({"type": "image_pil", "image_pil": 3}, "image_pil must be a URL such as"),
        ({"type": "video_url", "video_url": {"url": "x"}}, "of type 'video_url', which is refused"),
        ({"type": "input_audio", "input_audio": {}}, "of type 'input_audio', which is refused"),
    ],
)
def test_a_part_that_cannot_be_served_is_named(engine, part, message):
    with pytest.raises(ConfigError, match=r"messages\[0\]\.content\[1\]") as caught:
        engine().chat(user("see", part), PARAMS, use_tqdm=False)
    assert message in str(caught.value)


def test_files_are_read_where_the_operator_allows_it(engine, tmp_path):
    allowed, outside = tmp_path / "allowed", tmp_path / "outside.png"
    allowed.mkdir()
    (allowed / "a b.png").write_bytes(encoded())
    outside.write_bytes(encoded())
    (allowed / "link.png").symlink_to(outside)
    llm = engine(allowed_local_media_path=str(allowed))
    (output,) = llm.chat(user(image_url((allowed / "a b.png").as_uri())), PARAMS, use_tqdm=False)
    assert output.prompt_token_ids.count(IMAGE_ID) == 20
    for url in (outside.as_uri(), (allowed / "link.png").as_uri(), f"file://{allowed}/../outside.png"):
        with pytest.raises(ConfigError, match="not in the directory that allowed_local_media_path names"):
            llm.chat(user(image_url(url)), PARAMS, use_tqdm=False)
    with pytest.raises(ConfigError, match="cannot be read"):
        llm.chat(user(image_url((allowed / "none.png").as_uri())), PARAMS, use_tqdm=False)


class _Pictures(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        found = self.path == "/a.png"
        self.send_response(200 if found else 302)
        self.send_header("location", "/a.png")
        self.end_headers()
        self.wfile.write(encoded() if found else b"")

    def log_message(self, *_):
        pass


def test_hosts_are_asked_where_the_operator_allows_it(engine):
    llm = engine(allowed_media_domains=["127.0.0.1"])
    with http.server.HTTPServer(("127.0.0.1", 0), _Pictures) as server:
        thread = threading.Thread(target=functools.partial(server.serve_forever, poll_interval=0.01))
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        try:
            (output,) = llm.chat(user(image_url(f"{url}/a.png")), PARAMS, use_tqdm=False)
            assert output.prompt_token_ids.count(IMAGE_ID) == 20
            with pytest.raises(ConfigError, match="cannot be fetched"):
                llm.chat(user(image_url(f"{url}/redirected.png")), PARAMS, use_tqdm=False)
            with pytest.raises(ConfigError, match="names the host 'localhost'"):
                llm.chat(user(image_url(url.replace("127.0.0.1", "localhost"))), PARAMS, use_tqdm=False)
        finally:
            server.shutdown()
            thread.join()


# -- from coroutines and over HTTP --------------------------------------------------------------------
def test_async_and_server_answer_as_chat_does(smolvlm, engine):
    httpx = pytest.importorskip("httpx")
    pytest.importorskip("fastapi")
    from specdecode.serve.app import make_app
    from specdecode.serve.settings import ServerSettings

    conversation = user(image_url(data_url()), "what is it?")
    (wanted,) = engine().chat(conversation, PARAMS, use_tqdm=False)
    prompt = {"prompt": wanted.prompt, "multi_modal_data": {"image": IMAGE}}
    llm = AsyncLLM(str(smolvlm), dtype="float32", device="cpu", block_size=8)

    async def ask() -> None:
        async for output in llm.generate(prompt, PARAMS, "one"):
            last = output
        assert last.outputs[0].token_ids == answer(engine(), prompt)
        app = make_app(llm, ServerSettings(served_model_name=("tiny",)))
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            body = {"messages": conversation, "temperature": 0, "max_tokens": 6, "ignore_eos": True}
            got = (await client.post("/v1/chat/completions", json=body)).json()
            assert got["choices"][0]["message"]["content"] == wanted.outputs[0].text
            assert got["usage"]["prompt_tokens"] == len(wanted.prompt_token_ids)
            body["messages"] = user(image_url("http://example.org/x.png"))
            refused = await client.post("/v1/chat/completions", json=body)
            assert refused.status_code == 400
            assert "allowed_media_domains" in refused.json()["error"]["message"]

    try:
        asyncio.run(ask())
    finally:
        llm.shutdown()
