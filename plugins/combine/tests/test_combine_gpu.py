"""Combinations on a GPU: captured whole where all children are, on the host where one is; the same tokens."""

from __future__ import annotations

import pytest
import torch
from specdecode import SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def captured_steps(monkeypatch):
    """Graphs: checking each step's writes, as other tests of a run may ask for, would forbid them."""
    monkeypatch.delenv("SPECDECODE_CHECK_WRITES", raising=False)


NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
ITSELF = {"method": "scripted-self-draft", "num_speculative_tokens": 2}
#: On the host whatever the device.
ON_HOST = {"method": "scripted-ragged", "num_speculative_tokens": 2, "texts": []}
CASES = {
    "cascade": lambda head: {"method": "cascade", "proposers": [NGRAM, head], "min_score": 0.7},
    "extend": lambda head: {"method": "extend", "proposers": [ITSELF, NGRAM]},
    "auto": lambda head: {"method": "auto", "proposers": [NGRAM, head], "trial_steps": 8},
    "host": lambda head: {"method": "cascade", "proposers": [ON_HOST, head]},
}


def requests():
    prompts = [([3 + (7 * i + j) % 290 for j in range(5)] * 3)[: 6 + 2 * i] for i in range(5)]
    kinds = (
        {"temperature": 0},
        {"temperature": 0.6, "seed": 5, "top_p": 0.9},
        {"temperature": 0.4, "seed": 6},
    )
    return prompts, [SamplingParams(max_tokens=30, ignore_eos=True, **kinds[i % 3]) for i in range(5)]


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("name", CASES)
def test_the_same_tokens(llm_of, run, metrics, eagle, name, eager):
    options = {"device": "cuda", "enforce_eager": eager, "block_size": 16}
    with llm_of(None, **options) as plain:
        wanted = run(plain, *requests())
    with llm_of(CASES[name](eagle), **options) as llm:
        assert run(llm, *requests()) == wanted
        assert run(llm, *requests()) == wanted
        found = metrics(llm)
    assert found["specdecode:proposer_failures"] == found["specdecode:drafts_dropped_by_fault"] == 0
    assert found["vllm:spec_decode_num_accepted_tokens"] > 0
    if name in ("cascade", "extend") and not eager:
        counted = [
            value for key, value in found.items() if key.count(".") == 3 and key.endswith(".draft_tokens")
        ]
        assert min(counted) > 0  # counted inside the graph


def test_one_request_adds_up_in_the_graph(llm_of, run, metrics, eagle):
    with llm_of(CASES["cascade"](eagle), device="cuda", block_size=16) as llm:
        run(llm, [[5, 6, 7, 8] * 5], [SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)])
        found = metrics(llm)
    accepted = [
        value for key, value in found.items() if key.count(".") == 3 and key.endswith(".accepted_tokens")
    ]
    counted = found["vllm:spec_decode_num_accepted_tokens"] + found["specdecode:discarded_tokens"]
    # Of the last step, which the host gives up without a proposal behind it, nothing may be counted.
    assert abs(sum(accepted) - counted) <= 4
