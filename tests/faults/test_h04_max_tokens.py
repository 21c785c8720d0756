"""H04: ``max_tokens`` is exact, neither over nor under."""

from __future__ import annotations

import pytest

LIMITS = (1, 2, 5, 6, 7, 13)


@pytest.fixture(scope="module")
def longer(fault_lab):
    """A longer run, and what BASE makes of it."""
    ask = fault_lab.ask(fault_lab.prompt(2), max_tokens=40, ignore_eos=True)
    return ask, list(fault_lab.base([ask])[0].outputs[0].token_ids)


@pytest.mark.parametrize("late", [False, True], ids=["plain", "late"])
def test_h04_max_tokens_is_exact(faults, longer, drafter, late):
    """As many ids, log-probabilities and counted tokens, and the beginning of a longer run.

    ``usage.completion_tokens`` is the server's; here it is what ``vllm:generation_tokens`` counts.
    """
    ask, ids = longer
    config = faults.drafter(drafter, [ask.prompt + ids], 5)
    asks = [faults.ask(ask.prompt, max_tokens=limit, ignore_eos=True, logprobs=1) for limit in LIMITS]
    engine = faults.engine(config, async_scheduling=late)
    for limit, output in zip(LIMITS, engine.generate(asks), strict=True):
        (completion,) = output.outputs
        assert list(completion.token_ids) == ids[:limit]
        assert len(completion.logprobs) == limit
        assert (completion.finish_reason, completion.stop_reason) == ("length", None)
    assert engine.metric("vllm:generation_tokens") == sum(LIMITS)


def test_h04_a_request_of_one_token_drafts_nothing(faults, longer, drafter):
    ask, ids = longer
    engine = faults.engine(faults.drafter(drafter, [ask.prompt + ids], 5))
    (output,) = engine.generate([faults.ask(ask.prompt, max_tokens=1, ignore_eos=True)])
    assert list(output.outputs[0].token_ids) == ids[:1]
    assert engine.drafts == engine.drafted == engine.accepted == 0
    assert (output.metrics.draft_steps, output.metrics.drafted) == (0, 0)
    assert not any(record.ids for record in engine.recording.drafts)


def test_h04_the_whole_budget_comes_in_blocks(faults, longer):
    """With an oracle, k=5: the last block is shortened, and no step is spent on one token at a time."""
    ask, ids = longer
    engine = faults.engine(faults.drafter("oracle", [ask.prompt + ids], 5))
    (output,) = engine.generate([faults.ask(ask.prompt, max_tokens=15, ignore_eos=True)])
    assert list(output.outputs[0].token_ids) == ids[:15]
    # one from the prompt, blocks of 5 + 1, and one of the 2 that are left
    assert output.outputs[0].token_sources == [
        "target", *(["draft"] * 5 + ["target"]) * 2, "draft", "target"
    ]  # fmt: skip
    assert engine.accepted == 11
