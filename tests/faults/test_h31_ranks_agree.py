"""H31: tensor-parallel ranks draft, draw and schedule alike, whatever differs between their processes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from specdecode import SamplingParams
from specdecode.distributed.errors import WorkerDied
from specdecode.testing.lossless import Engine, requests
from specdecode.testing.ranks import ranks_in_threads

#: Seconds after which ranks that wait for each other are given up.
WATCHDOG = 60.0
FOUR = {"num_speculative_tokens": 4}
METHODS = {
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3, **FOUR},
    "suffix": {"method": "suffix", **FOUR},
    "draft": {"method": "draft_model", **FOUR},
}
KINDS = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.0, "seed": 11},
    "unseeded": {"temperature": 1.0},
}


def asks():
    prompts, _ = requests(6)
    kinds = list(KINDS.values())
    return prompts, [
        SamplingParams(max_tokens=12 + place, ignore_eos=True, **kinds[place % 3]) for place in range(6)
    ]


def traced(engine, trace):
    """Have ``engine`` write down before each step what it runs: requests in order, tokens, drafts."""
    step = engine.core.step

    def watched():
        trace.append(
            [
                (r.id, tuple(r.token_ids), tuple(r.drafts.ids), r.stats.accepted)
                for r in engine.core.scheduler.running
            ]
        )
        return step()

    engine.core.step = watched


@pytest.mark.parametrize("order", ["plain", "late"])
@pytest.mark.parametrize("method", METHODS)
def test_every_step_is_the_same_on_both(lab, method, order):
    """Unseeded requests too: their seeds come from one sequence."""
    config = METHODS[method] | ({"model": str(lab.draft)} if method == "draft" else {})
    prompts, params = asks()
    expected = Engine(lab.target)(prompts, params)
    with ranks_in_threads() as started:
        engine = Engine(lab.target, config, order, tensor_parallel_size=2)
    (ranks,) = started
    traces = [[], []]
    traced(engine.llm.llm_engine, traces[0])
    traced(ranks.caught_up(1), traces[1])
    assert engine(prompts, params) == expected
    ranks.caught_up(1)
    assert traces[0] == traces[1] and len(traces[0]) > 3
    assert order == "late" or any(drafts for step in traces[0] for _, _, drafts, _ in step)
    engine.llm.shutdown()


def test_ranks_that_part_are_told_apart_before_they_compute(lab, monkeypatch):
    """What every step compares would see a token, a draft or an order that differs."""
    monkeypatch.setattr("specdecode.testing.ranks.PATIENCE", 2.0)
    with ranks_in_threads() as started:
        engine = Engine(lab.target, tensor_parallel_size=2).llm.llm_engine
    engine.add_request("a", {"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=9, ignore_eos=True))
    engine.step()
    started[0].caught_up(1).core.scheduler.running[0].token_ids[-1] ^= 1
    with pytest.raises(WorkerDied, match="have parted"):
        for _ in range(3):
            engine.step()
    engine.shutdown()


def test_processes_with_other_hashes_and_generators(lab, monkeypatch):
    """Sets are ordered otherwise in a process with another hash seed, and torch's generator is elsewhere."""
    monkeypatch.setenv("PYTHONHASHSEED", "31")  # of the process to come, not of this one
    config = {**METHODS["draft"], "model": str(lab.draft)}
    prompts, params = asks()
    torch.manual_seed(12345)

    def run():
        engine = Engine(lab.target, config, "late", tensor_parallel_size=2)
        found = engine(prompts, params)
        engine.llm.shutdown()
        return found

    pool = ThreadPoolExecutor(1)
    try:
        found = pool.submit(run).result(WATCHDOG)
    finally:
        pool.shutdown(wait=False)
    assert found == Engine(lab.target)(prompts, params)
