"""What operators look at: /health, /metrics, logs, spans, the page, and what only they may do."""

from __future__ import annotations

import io
import json
import logging
import threading

import pytest

PROMPT = {"prompt": "one two one two one two ", "max_tokens": 60, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def http(served):
    with served.http() as http:
        yield http


def families(text):
    parser = pytest.importorskip("prometheus_client.parser")
    return {family.name: family for family in parser.text_string_to_metric_families(text)}


def samples(text, name):
    return [
        (sample.labels, sample.value)
        for family in families(text).values()
        for sample in family.samples
        if sample.name == name
    ]


def test_metrics_are_what_the_engine_counts(http, llm):
    http.post("/v1/completions", json=PROMPT | {"n": 2})
    response = http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    counted = {metric.name: metric.value for metric in llm.engine.get_metrics()}
    for name in (
        "vllm:spec_decode_num_drafts",
        "vllm:spec_decode_num_draft_tokens",
        "vllm:spec_decode_num_accepted_tokens",
        "vllm:prompt_tokens",
        "vllm:generation_tokens",
        "vllm:prefix_cache_queries",
        "vllm:num_preemptions",
    ):
        ((labels, value),) = samples(response.text, f"{name}_total")
        assert value == counted[name] and labels["model_name"] == "tiny"
    assert counted["vllm:spec_decode_num_accepted_tokens"] > 0
    by_position = samples(response.text, "vllm:spec_decode_num_accepted_tokens_per_pos_total")
    assert [labels["position"] for labels, _ in by_position] == ["0", "1", "2", "3"]
    assert [value for _, value in by_position] == counted["vllm:spec_decode_num_accepted_tokens_per_pos"]
    for name in ("time_to_first_token", "inter_token_latency", "e2e_request_latency"):
        ((_, count),) = samples(response.text, f"vllm:{name}_seconds_count")
        buckets = samples(response.text, f"vllm:{name}_seconds_bucket")
        assert count == buckets[-1][1] == counted[f"vllm:{name}_seconds"]["count"] > 0
        assert buckets[-1][0]["le"] == "+Inf"
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert families(response.text)[f"vllm:{name}"].type == "gauge"
    (finished,) = samples(response.text, "vllm:request_success_total")
    assert finished[0]["finished_reason"] == "length" and finished[1] >= 2
    handlers = [labels["handler"] for labels, _ in samples(response.text, "specdecode:http_requests_total")]
    assert "/v1/completions" in handlers


def test_names_that_prometheus_has_no_room_for():
    from specdecode.engine.metrics import Counter, Gauge
    from specdecode.serve.metrics import render

    text = render(
        [
            Gauge(name="a-method.hits in %", reading=0.5),
            Counter(name="specdecode:x", labels={"a": 'q"\\\n'}, total=2),
        ],
        {"model_name": "m"},
    )
    found = families(text)
    assert found["specdecode:a_method_hits_in__"].samples[0].value == 0.5
    assert found["specdecode:x"].samples[0].labels == {"model_name": "m", "a": 'q"\\\n'}


def test_health_fails_when_a_step_hangs(llm, serve, monkeypatch):
    served = serve(llm, stuck_after=0.2)
    release, entered = threading.Event(), threading.Event()
    real = llm.engine.core.step

    def hangs():
        entered.set()
        release.wait(20)
        return real()

    with served.http() as http:
        assert http.get("/health").json() == {"status": "ok", "open_requests": 0}
        monkeypatch.setattr(llm.engine.core, "step", hangs)
        asking = threading.Thread(target=lambda: served.client().completions.create(model="tiny", prompt="a"))
        asking.start()
        try:
            assert entered.wait(10)
            threading.Event().wait(0.3)
            failing = http.get("/health")
            assert failing.status_code == 503 and "under way" in failing.json()["reason"]
            assert samples(http.get("/metrics").text, "vllm:num_requests_running") is not None
        finally:
            release.set()
            asking.join(10)
        served.wait_idle()
        assert http.get("/health").status_code == 200


def test_a_dead_engine_is_told_by_everything(make_llm, serve, monkeypatch):
    llm = make_llm()
    served = serve(llm)

    def broken():
        raise ValueError("the device is gone")

    with served.http() as http:
        http.get("/metrics")
        monkeypatch.setattr(llm.engine.core, "step", broken)
        failed = http.post("/v1/completions", json=PROMPT)
        assert failed.status_code == 503 and failed.json()["error"]["code"] == "engine_dead"
        assert "the device is gone" in failed.json()["error"]["message"]
        assert http.post("/v1/completions", json=PROMPT | {"stream": True}).status_code == 503
        assert http.get("/health").status_code == 503
        assert http.get("/metrics").status_code == 200  # what was counted before
    llm.shutdown()


def test_info_and_page(http, llm):
    info = http.get("/specdecode/info").json()
    assert info["method"] == "ngram" and info["num_speculative_tokens"] == 4
    assert info["memory"]["kv_bytes"] == llm.memory_plan().kv_bytes
    assert info["target"]["max_model_len"] == 1024
    page = http.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "specdecode/info" in page.text and "http" not in page.text.replace("http-equiv", "")
    assert http.get("/version").json()["version"]


def test_administration_wants_its_own_key(llm, serve):
    from specdecode.serve.settings import read_keys

    (admin,), users = read_keys(["admin-key"], None), read_keys(["user-key"], None)
    served = serve(llm, admin_key=admin, api_keys=users)
    as_admin = {"authorization": "Bearer admin-key"}
    prompt = PROMPT | {"prompt": "a prompt that fills a block of sixteen tokens", "max_tokens": 1}
    with served.http() as http:

        def cached():
            got = http.post("/v1/completions", json=prompt, headers={"authorization": "Bearer user-key"})
            return got.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

        cached()
        assert cached() > 0
        for headers in ({}, {"authorization": "Bearer user-key"}):
            assert http.post("/reset_prefix_cache", headers=headers).status_code == 401
        assert http.post("/reset_prefix_cache", headers=as_admin).json() == {"reset": True}
        assert cached() == 0
        assert http.post("/v1/completions", json=PROMPT, headers=as_admin).status_code == 401


def test_sleeping(llm, serve):
    from specdecode.serve.settings import read_keys

    served = serve(llm, admin_key=read_keys(["admin-key"], None)[0])
    answers = []
    with served.http(headers={"authorization": "Bearer admin-key"}) as http:
        assert http.post("/sleep").json() == {"is_sleeping": True}
        assert http.get("/is_sleeping").json() == {"is_sleeping": True}
        assert http.get("/health").json()["status"] == "sleeping"
        asking = threading.Thread(target=lambda: answers.append(http.post("/v1/completions", json=PROMPT)))
        asking.start()
        asking.join(0.3)
        assert asking.is_alive() and llm.num_streams == 1 and not answers
        assert http.get("/metrics").status_code == 200
        refused = http.post("/sleep?level=1")
        assert refused.status_code == 400 and "level=1 is refused" in refused.json()["error"]["message"]
        http.post("/wake_up")
        asking.join(30)
        assert answers[0].json()["usage"]["completion_tokens"] == 60
        assert http.get("/is_sleeping").json() == {"is_sleeping": False}


def test_without_an_admin_key_there_is_no_administration(http):
    assert http.post("/reset_prefix_cache").status_code == 404


# -- logs and spans --------------------------------------------------------------------------------
@pytest.fixture
def logged():
    """What is logged meanwhile, as JSON."""
    from specdecode.serve.logs import JsonFormatter

    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.setFormatter(JsonFormatter())
    logger = logging.getLogger("specdecode.serve")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lambda: [json.loads(line) for line in text.getvalue().splitlines()]
    logger.removeHandler(handler)
    logger.setLevel(before)


@pytest.mark.parametrize("stream", [False, True])
def test_a_line_for_each_request(http, served, logged, stream):
    response = http.post("/v1/completions", json=PROMPT | {"stream": stream})
    http.post("/v1/completions", json=PROMPT | {"temperature": -1})
    served.wait_idle()
    good, bad = logged()
    assert good["request_id"] == response.headers["x-request-id"]
    assert (good["status"], good["stream"], good["level"]) == (200, stream, "info")
    assert good["completion_tokens"] == 60 and good["finish_reasons"] == ["length"]
    assert good["drafted_tokens"] >= good["accepted_tokens"] > 0
    assert 0 < good["first_output_seconds"] <= good["seconds"]
    assert bad["status"] == 400 and bad["completion_tokens"] == 0


def test_logs_as_text_and_with_tracebacks():
    from specdecode.serve.logs import JsonFormatter, TextFormatter

    try:
        raise ValueError("on purpose")
    except ValueError as error:
        caught = (type(error), error, error.__traceback__)
    record = logging.LogRecord("x", logging.ERROR, __file__, 1, "request", (), caught)
    record.facts = {"status": 500, "key": None, "reasons": []}
    assert "ValueError: on purpose" in json.loads(JsonFormatter().format(record))["exception"]
    assert "request" in TextFormatter().format(record)
    assert TextFormatter().format(record).endswith("status=500")


def test_spans(llm, serve):
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    served = serve(llm)
    served.service.tracing._tracer = provider.get_tracer("test")
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with served.http() as http:
        http.post("/v1/completions", json=PROMPT, headers={"traceparent": parent})
        served.wait_idle()
    (span,) = exporter.get_finished_spans()
    assert span.name == "llm_request"
    assert f"{span.context.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
    assert span.attributes["gen_ai.usage.output_tokens"] == 60
    assert span.attributes["specdecode.accepted_tokens"] > 0
    assert span.attributes["gen_ai.request.model"] == "tiny"
