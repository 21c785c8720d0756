"""H13: drafts never run past the end of the context, and a prompt that fills it is refused alike."""

from __future__ import annotations

import pytest

LIMIT = 32
K = 6
LATE = ("oracle", "ngram", "self-draft", "eagle3-grown-tree")


@pytest.fixture(scope="module")
def asks(fault_lab):
    """Prompts of 24 to 31 tokens, and what would go on for 100."""
    long = fault_lab.prompt(5)[: LIMIT - 1]
    return [
        fault_lab.ask([9 + start, *long[1:length]], max_tokens=100, ignore_eos=True)
        for start, length in enumerate(range(24, LIMIT))
    ]


def _options(late=False):
    # So many blocks that a row fills them to the last slot.
    return {"max_model_len": LIMIT, "async_scheduling": late, "num_gpu_blocks_override": 8 * LIMIT // 4}


@pytest.fixture(scope="module")
def texts(fault_lab, asks):
    """What would follow if the context were longer, so that drafts could run past its end."""
    return fault_lab.texts([fault_lab.ask(ask.prompt, max_tokens=60) for ask in asks])


def test_h13_no_draft_past_the_end(faults, same, asks, texts, drafter):
    want = faults.base(asks, max_model_len=LIMIT)
    engine = faults.engine(faults.drafter(drafter, texts, K), **_options(drafter in LATE))
    outputs = engine.generate(asks)
    same(outputs, want)
    for ask, output in zip(asks, outputs, strict=True):
        (completion,) = output.outputs
        assert len(ask.prompt) + len(completion.token_ids) == LIMIT
        assert completion.finish_reason == "length"
    for record in engine.recording.drafts:
        if record.room or record.budget:  # the bonus token has a place too
            assert len(record.history) + record.room < LIMIT
    assert not engine.metric("specdecode:drafts_dropped_by_fault")
    if drafter == "oracle":
        # Behind a prompt of n tokens: one from the prompt, then blocks of at most K drafts and a bonus.
        for output in outputs:
            assert output.outputs[0].token_sources == _blocks(len(output.outputs[0].token_ids))


def _blocks(count):
    """Sources of ``count`` tokens of an oracle, the last block shortened."""
    endless = ["target", *(["draft"] * K + ["target"]) * count]
    return [*endless[: count - 1], "target"]


def test_h13_no_room_beside_a_full_context_is_an_end(faults, same, drafter, texts, asks):
    """Shorter limits end before the context does, a stop before both."""
    short = [
        faults.ask(ask.prompt, max_tokens=count, ignore_eos=True)
        for ask, count in zip(asks, range(1, 9), strict=True)
    ]
    engine = faults.engine(faults.drafter(drafter, texts, K), **_options())
    same(engine.generate(short), faults.base(short, max_model_len=LIMIT))


@pytest.mark.parametrize("drafter", ["ngram", "oracle", "self-draft", "eagle3"])
def test_h13_a_prompt_that_fills_the_context(faults, same, asks, texts, drafter):
    """Prompts of 32 and 33 are refused in the words of an engine without speculation; the next one works."""
    plain = faults.plain(max_model_len=LIMIT)
    engine = faults.engine(faults.drafter(drafter, texts, K), **_options())
    for length in (LIMIT, LIMIT + 1):
        ask = faults.ask(faults.prompt(5)[:length], max_tokens=100)
        assert len(ask.prompt) == length
        said = []
        for one in (plain, engine):
            with pytest.raises(
                ValueError, match=f"has {length} tokens; with max_model_len={LIMIT} at most 31"
            ) as error:
                one.generate([asks[0], ask])
            said.append(str(error.value))
        assert said[0] == said[1]
        same(engine.generate(asks[:2]), faults.base(asks[:2], max_model_len=LIMIT))
