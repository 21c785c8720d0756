"""H19: an aborted request ends at once and disturbs nobody; a normal end aborts nothing.

What a client that goes away does to a server is in core's ``tests/serving``.
"""

from __future__ import annotations

import itertools

import pytest

#: Drafts on the host, a draft model and heads with KV of their own, and trees.
DRAFTERS = ("ngram", "oracle", "ragged", "oracle-tree", "self-draft", "eagle3", "eagle3-grown-tree")


def asks_of(faults):
    prompts = [faults.prompt(index) for index in (1, 3, 0, 2)]
    sampled = {"temperature": 0.8, "seed": 11, "max_tokens": 60}  # the second one is aborted before its end
    return [
        faults.ask(prompt, ignore_eos=True, **(sampled if index == 1 else {"max_tokens": 18}))
        for index, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("late", [False, True], ids=["plain", "async"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_h19_neighbours_of_an_aborted_request(faults, same, drafter, late):
    """Aborted after each number of steps: while it waits, amid its chunked prompt, with drafts pending."""
    asks = asks_of(faults)
    wanted = faults.base(asks)
    engine = faults.engine(
        faults.drafter(drafter, faults.texts(asks), 4),
        max_num_batched_tokens=8,
        max_num_seqs=3,
        async_scheduling=late,
    )
    llm = engine.llm.llm_engine
    for steps in (0, 1, 2, 3, 5, 8):
        for number, ask in enumerate(asks):
            llm.add_request(str(number), {"prompt_token_ids": ask.prompt}, ask.params)
        finished = {}
        for step in itertools.count():
            if step == steps:
                (last,) = llm.abort_request("1")
                assert last.finished and last.outputs[0].finish_reason == "abort"
                told = list(last.outputs[0].token_ids)
                assert told == list(wanted[1].outputs[0].token_ids[: len(told)])
                assert not llm.has_request("1")
                assert llm.abort_request(["1", "nobody's"]) == []  # twice, and an unknown one
                llm.add_request("1", {"prompt_token_ids": asks[1].prompt}, asks[1].params)  # the id is free
            if not llm.has_unfinished_requests():
                break
            finished |= {output.request_id: output for output in llm.step() if output.finished}
        same([finished[str(number)] for number in range(len(asks))], wanted, f"aborted after {steps} steps:")
        engine.assert_idle()
    assert engine.drafts > 0


@pytest.mark.parametrize("n", [1, 3])
def test_h19_abort_of_all_its_completions(faults, n):
    engine = faults.engine({"method": "ngram", "num_speculative_tokens": 4})
    ask = faults.ask(faults.prompt(2), max_tokens=30, ignore_eos=True, n=n, temperature=0.7, seed=1)
    llm = engine.llm.llm_engine
    llm.add_request("several", {"prompt_token_ids": ask.prompt}, ask.params)
    for _ in range(6):
        llm.step()
    (last,) = llm.abort_request("several")
    assert [completion.finish_reason for completion in last.outputs] == ["abort"] * n
    assert not llm.has_unfinished_requests()
    engine.assert_idle()
