"""A server whose requests ask for adapters by name, and ``AsyncLLM`` that answers with them."""

from __future__ import annotations

import asyncio

import pytest
from specdecode import LLM, LoRARequest, SamplingParams
from specdecode.contract import ConfigError
from specdecode.testing.adapters import write_adapter

NAMES = ("sql", "tale")
PARAMS = SamplingParams(temperature=1.0, seed=3, max_tokens=12)


@pytest.fixture(scope="module")
def requests(serving_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    return [
        LoRARequest(name, number, str(write_adapter(folder / name, serving_model, seed=number, strength=2.0)))
        for number, name in enumerate(NAMES, 1)
    ]


@pytest.fixture(scope="module")
def expected(serving_model, requests):
    """Name -> text, by an engine that serves nobody."""
    with LLM(str(serving_model), dtype="float32", device="cpu", enable_lora=True, max_loras=2) as llm:
        outputs = llm.generate(["a b a b "] * 3, PARAMS, use_tqdm=False, lora_request=[None, *requests])
    texts = [output.outputs[0].text for output in outputs]
    assert len(set(texts)) == 3
    return dict(zip((None, *NAMES), texts, strict=True))


@pytest.fixture(scope="module")
def llm(make_llm):
    llm = make_llm(enable_lora=True, max_loras=1)
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def served(llm, serve, requests):
    return serve(llm, adapters=tuple(requests))


def test_requests_name_their_adapter(served, expected):
    client = served.client()
    for name in (*NAMES, None, *NAMES):
        answer = client.completions.create(
            model=name or "tiny", prompt="a b a b ", max_tokens=12, temperature=1.0, seed=3
        )
        assert answer.choices[0].text == expected[name] and answer.model == (name or "tiny")
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 12, "seed": 3}
    one, other = (client.chat.completions.create(model=name, **chat).choices[0].message for name in NAMES)
    assert one.content != other.content
    with served.http() as http:
        text = http.get("/metrics").text
    assert 'specdecode:lora_generation_tokens_total{model_name="tiny",engine="0",lora_name="sql"}' in text


def test_models_lists_them(served, requests):
    client = served.client()
    models = {model.id: model for model in client.models.list()}
    assert list(models) == ["tiny", *NAMES]
    assert models["tiny"].parent is None and models["sql"].parent == "tiny"
    assert models["sql"].root == requests[0].lora_path
    assert client.models.retrieve("tale").root == requests[1].lora_path
    with served.http() as http:
        answer = http.post("/v1/completions", json={"model": "poem", "prompt": "a"})
    assert answer.status_code == 404 and "tiny, sql, tale" in answer.text


def test_coroutines(llm, requests, expected, tmp_path):
    async def text(name, request):
        async for output in llm.generate("a b a b ", PARAMS, f"coroutine-{name}", request):
            last = output
        assert last.lora_request == request
        return last.outputs[0].text

    async def all_of_them():
        asked = zip((None, *NAMES), (None, *requests), strict=True)
        return await asyncio.gather(*(text(*one) for one in asked))

    assert asyncio.run(all_of_them()) == list(expected.values())
    with pytest.raises(ConfigError, match="nowhere"):
        asyncio.run(text("bad", LoRARequest("bad", 7, str(tmp_path / "nowhere"))))


@pytest.mark.parametrize(
    ("options", "needles"),
    [
        (["--lora-modules", "sql=somewhere"], ["--lora-modules", "--enable-lora"]),
        (["--enable-lora", "--lora-modules", "sql"], ["NAME=PATH", "'sql'"]),
        (["--enable-lora", "--lora-modules", "sql=a", "--lora-modules", "sql=b"], ["sql is served twice"]),
        (["--max-loras", "2"], ["max_loras=2", "enable_lora=True"]),
        (["--enable-lora", "--lora-modules", "sql=no/where"], ["no/where"]),
    ],
)
def test_the_command_tells_what_is_wrong(serving_model, options, needles):
    from specdecode.cli.app import app
    from typer.testing import CliRunner

    result = CliRunner().invoke(app, ["serve", str(serving_model), "--device", "cpu", *options])
    assert result.exit_code == 1
    told = " ".join((result.output + str(result.exception)).split())
    for needle in needles:
        assert needle in told, told
