"""Requests that a fuzzer makes from the server's own description: no error is ever the server's."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, given, settings

schemathesis = pytest.importorskip("schemathesis")

#: For each endpoint; ``SPECDECODE_FUZZ`` asks for another number, of new ones each time.
EXAMPLES = int(os.environ.get("SPECDECODE_FUZZ", "60"))


@pytest.fixture(scope="module")
def llm(make_llm):
    """One whose answers are short, however long they may be."""
    llm = make_llm(max_model_len=128)
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def api_schema(serve, llm):
    from specdecode.serve.settings import read_keys

    (admin,) = read_keys(["admin-key"], None)
    parsers = {"reasoning_parser": "think", "tool_call_parser": "hermes"}
    served = serve(llm, **parsers, admin_key=admin, max_completions=4)
    yield schemathesis.openapi.from_url(f"{served.url}/openapi.json")
    served.wait_idle(5.0)
    assert not llm.errored
    pool = llm.engine.core.scheduler.pool
    assert pool.num_free == pool.num_blocks


def fuzzed(operation) -> set[int]:
    """Statuses that requests to ``operation`` were answered with."""
    seen = set()

    @given(case=operation.as_strategy())
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize="SPECDECODE_FUZZ" not in os.environ,
    )
    def fuzz(case):
        response = case.call(headers={"authorization": "Bearer admin-key"}, timeout=60)
        seen.add(response.status_code)
        assert response.status_code < 500, response.text
        if response.status_code >= 400:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    fuzz()
    return seen


def test_no_error_is_the_servers(api_schema):
    found = [one.ok() for one in api_schema.get_all_operations()]
    operations = [one for one in found if one.path != "/sleep"]  # requests that wait for ever are no fault
    statuses = {operation.label: fuzzed(operation) for operation in operations}
    assert statuses.keys() >= {"POST /v1/completions", "POST /v1/chat/completions", "GET /v1/models"}
    # Some of them can be served.
    assert 200 in statuses["POST /v1/completions"] and 200 in statuses["POST /v1/chat/completions"]
