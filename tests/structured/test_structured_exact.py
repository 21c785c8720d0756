"""Structured outputs do not depend on drafts, batch or memory, and are what the grammar allows."""

from __future__ import annotations

from typing import Any

import pytest

DRAFTERS = ("ngram", "oracle", "liar", "ragged", "oracle-tree", "self-draft", "eagle-grown-tree")

#: Ways to run a batch: arguments of the engine.
ENGINES: dict[str, dict[str, Any]] = {
    "whole": {},
    "late": {"order": "late"},
    "chunked": {"max_num_batched_tokens": 40},
    "preempted": {"num_gpu_blocks_override": 60},
}


def shown(output: Any) -> list[Any]:
    return [(list(c.token_ids), c.text, c.finish_reason, c.stop_reason, c.error) for c in output.outputs]


CELLS = [
    *((drafter, engine) for drafter in ("none", *DRAFTERS) for engine in ("whole", "late")),
    *(
        (drafter, engine)
        for drafter in ("none", "oracle", "oracle-tree", "self-draft")
        for engine in ("chunked", "preempted")
    ),
]


@pytest.mark.parametrize(("drafter", "engine"), CELLS)
def test_drafts_and_neighbours_change_nothing(structured, drafter, engine):
    asks = structured.asks()
    rig = structured.rig(drafter, asks, **ENGINES[engine])
    before = rig.metric("vllm:spec_decode_num_accepted_tokens"), rig.metric("vllm:num_preemptions")
    for ask, output in zip(asks, structured.run(rig, asks), strict=True):
        assert shown(output) == shown(structured.alone(ask)), ask.params
    accepted = rig.metric("vllm:spec_decode_num_accepted_tokens") - before[0]
    assert (accepted > 20) == (drafter not in ("none", "liar"))
    assert (rig.metric("vllm:num_preemptions") > before[1]) == (engine == "preempted")


@pytest.mark.parametrize("drafter", ["oracle", "oracle-tree", "self-draft"])
def test_a_second_time_from_the_prefix_cache(structured, drafter):
    asks = structured.asks()
    rig = structured.rig(drafter, asks)
    structured.run(rig, asks)
    for ask, output in zip(asks, structured.run(rig, asks), strict=True):
        assert output.num_cached_tokens > 0
        assert shown(output) == shown(structured.alone(ask))


def test_without_speculation_it_is_the_reference(structured, kinds):
    """A decoder and a grammar that begin anew for each token."""
    from specdecode.testing.reference import ReferenceDecoder

    reference = ReferenceDecoder(structured.lab.model, structured.tokenizer, eos_ids=[structured.EOS])
    for name, kind in kinds.items():
        grammar = structured.grammar(kind.wish)
        for changes in ({}, {"temperature": 1.0, "seed": 11}, {"temperature": 0.8, "seed": 1, "n": 2}):
            ask = structured.ask(kind.wish, "reference", **changes)
            want = reference.request(ask.prompt, ask.params, grammar=grammar)
            assert shown(structured.alone(ask)) == shown(want), name


def test_every_complete_output_is_valid(structured, kinds):
    stopped = dict.fromkeys(kinds, 0)
    for name, kind in kinds.items():
        grammar = structured.grammar(kind.wish)
        asks = [
            structured.ask(kind.wish, temperature=1.2, seed=seed, n=2, max_tokens=40) for seed in range(6)
        ]
        for output in structured.run(structured.rig("none"), asks):
            for completion in output.outputs:
                text = completion.text
                if completion.finish_reason == "stop":
                    stopped[name] += 1
                    assert kind.valid(text), (name, text)
                else:
                    assert completion.finish_reason == "length"
                    assert grammar(completion.token_ids), (name, text)
    assert all(count > 3 for name, count in stopped.items() if name != "json-object"), stopped
