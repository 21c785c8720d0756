"""H27: what counts as a draft, accepted, discarded, the bonus; no nan; nothing without speculation."""

from __future__ import annotations

import math

import pytest

K = 4
ORDERS = pytest.mark.parametrize("order", ["plain", "late"])
EOS = 2


def values(engine):
    return {metric.name: metric.value for metric in engine.llm.get_metrics()}


def numbers(value):
    """All numbers of a reading."""
    if isinstance(value, dict):
        return [number for part in value.values() for number in numbers(part)]
    return list(value) if isinstance(value, list) else [value]


def counts(engine):
    seen = values(engine)
    return {
        "drafts": seen["vllm:spec_decode_num_drafts"],
        "draft_tokens": seen["vllm:spec_decode_num_draft_tokens"],
        "accepted": seen["vllm:spec_decode_num_accepted_tokens"],
        "per_pos": seen["vllm:spec_decode_num_accepted_tokens_per_pos"],
        "discarded": seen["specdecode:discarded_tokens"],
        "bonus": seen["specdecode:bonus_tokens"],
    }


def drafts_that_accept(text, start, accepted):
    """Texts by which an oracle drafts, from token ``start`` on, so many right tokens in each step."""
    texts = []
    for count in accepted:
        drafts = text[start : start + K]
        if count < K:
            drafts[count] = drafts[count] % 299 + 1
        texts.append(text[:start] + drafts)
        start += count + 1
    return texts


@ORDERS
def test_h27_four_steps_that_accept_0_2_4_and_1(faults, order):
    """And steps without drafts behind them, which count nowhere."""
    ask = faults.ask(faults.prompt(1), max_tokens=20)
    (text,) = faults.texts([ask])
    texts = drafts_that_accept(text, len(ask.prompt) + 1, (0, 2, 4, 1))
    engine = faults.engine(faults.drafter("oracle", texts, K), async_scheduling=order == "late")
    (output,) = engine.generate([ask])
    assert counts(engine) == {
        "drafts": 4,
        "draft_tokens": 16,
        "accepted": 7,
        "per_pos": [3, 2, 1, 1],
        "discarded": 0,
        "bonus": 4,
    }
    seen = values(engine)
    assert seen["specdecode:draft_step_tokens"] == 11
    assert seen["vllm:generation_tokens"] == 20
    assert seen["specdecode:decode_tokens"] == 19 and seen["specdecode:decode_steps"] == 4 + 8
    told = output.metrics
    assert (told.drafted, told.accepted, told.discarded, told.bonus, told.draft_steps) == (16, 7, 0, 4, 4)
    assert told.acceptance_length == 11 / 4
    assert output.outputs[0].token_sources.count("draft") == 7


@ORDERS
@pytest.mark.parametrize("ending", ["stop-id", "stop-string", "eos"])
@pytest.mark.parametrize("offset", range(K + 1))
def test_h27_drafts_accepted_behind_the_end_are_discarded(faults, order, ending, offset):
    """The output ends at each offset of an accepted draft, and with the bonus token."""
    letters = [3 + byte for byte in b"abcdefghijklmnop"]
    ask = faults.ask(faults.prompt(2), max_tokens=16, allowed_token_ids=letters, presence_penalty=2.0)
    (text,) = faults.texts([ask])
    output = text[len(ask.prompt) :]
    last = 1 + offset  # token 0 is the prompt's, the first draft is tokens 1..4, its bonus token 5
    assert output.index(output[last]) == last
    changes = {
        "stop-id": {"stop_token_ids": [output[last]]},
        "stop-string": {"stop": [chr(output[last] - 3)]},
        "eos": {"logits_processors": [forcing(last)], "allowed_token_ids": [*letters, EOS]},
    }[ending]
    told = text if ending != "eos" else [*text[: len(ask.prompt) + last], EOS, *text[-20:]]
    engine = faults.engine(faults.drafter("oracle", [told], K), async_scheduling=order == "late")
    ask = faults.ask(
        ask.prompt, **{"max_tokens": 16, "allowed_token_ids": letters, "presence_penalty": 2.0} | changes
    )
    (stopped,) = engine.generate([ask])
    completion = stopped.outputs[0]
    assert completion.finish_reason == "stop" and len(completion.token_ids) == last + 1
    # With an EOS that is drafted, what is drafted behind it is not what the target would go on with.
    behind = 0 if ending == "eos" else K - offset - 1
    want = {
        "drafts": 1,
        "draft_tokens": K,
        "accepted": min(offset + 1, K),
        "per_pos": [1] * min(offset + 1, K) + [0] * max(K - offset - 1, 0),
        "discarded": max(behind, 0),
        "bonus": int(offset == K),
    }
    assert counts(engine) == want
    assert stopped.metrics.discarded == want["discarded"] and stopped.metrics.bonus == want["bonus"]
    assert completion.token_sources.count("draft") == want["accepted"]
    assert values(engine)["vllm:generation_tokens"] == last + 1


def forcing(place):
    """A processor that makes the output's token at ``place`` an EOS."""

    def force(output_ids, logits):
        if len(output_ids) == place:
            logits[EOS] += 1000
        else:
            logits[EOS] -= 1000
        return logits

    return force


def test_h27_ragged_drafts_count_at_their_true_lengths(faults):
    asks = [faults.ask(faults.prompt(index), max_tokens=18) for index in range(4)]
    engine = faults.engine(faults.drafter("ragged", faults.texts(asks), K))
    engine.generate(asks)
    lengths = [len(draft.ids) for draft in engine.recording.drafts if draft.ids]
    assert set(lengths) == {1, 2, 3, 4} and len(lengths) < len(engine.recording.drafts)
    seen = counts(engine)
    assert (seen["drafts"], seen["draft_tokens"]) == (len(lengths), sum(lengths))
    assert seen["accepted"] == sum(lengths), "every one of them was right"
    assert seen["per_pos"] == [sum(length > place for length in lengths) for place in range(K)]


@pytest.mark.parametrize("drafter", ["oracle", "ngram", "liar"])
def test_h27_nothing_drafted_or_nothing_accepted_gives_no_nan(faults, drafter):
    """Before any request, without a draft, and without an accepted one."""
    ask = faults.ask([7], max_tokens=5)
    texts = faults.texts([ask]) if drafter == "liar" else []
    engine = faults.engine(faults.drafter(drafter, texts, K))
    for _ in range(2):
        assert all(math.isfinite(number) for value in values(engine).values() for number in numbers(value))
        (output,) = engine.generate([ask])
    if drafter != "ngram":  # whose prompts may repeat themselves
        assert output.metrics.acceptance_length == (1.0 if drafter == "liar" else None)
        assert counts(engine)["accepted"] == 0 and counts(engine)["per_pos"] == [0] * K
    if drafter == "oracle":
        assert counts(engine)["drafts"] == counts(engine)["draft_tokens"] == 0


@ORDERS
def test_h27_counters_only_grow_and_two_reads_agree(faults, order):
    """Read after every step of a batch that is preempted, stopped and aborted."""
    asks = [faults.ask(faults.prompt(index), max_tokens=16, n=1 + index % 2) for index in range(6)]
    config = faults.drafter("spoiled", faults.texts(asks), K)
    engine = faults.engine(config, async_scheduling=order == "late", num_gpu_blocks_override=40)
    for number, ask in enumerate(asks):
        engine.llm.llm_engine.add_request(str(number), {"prompt_token_ids": ask.prompt}, ask.params)
    first = before = engine.llm.get_metrics()
    steps = 0
    while engine.llm.llm_engine.has_unfinished_requests():
        engine.llm.llm_engine.step()
        steps += 1
        if steps == 6:
            engine.llm.llm_engine.abort_request("3")
        after = engine.llm.get_metrics()
        assert after == engine.llm.get_metrics()
        for old, new in zip(before, after, strict=True):
            assert (old.name, old.labels) == (new.name, new.labels)
            if type(new).__name__ != "Gauge":
                pairs = zip(numbers(old.value), numbers(new.value), strict=True)
                assert all(one <= other for one, other in pairs), new.name
            if new.name.endswith("per_pos"):
                assert len(new.value) == K
        before = after
    for metric in first:  # a reading does not change any more
        if type(metric).__name__ != "Gauge":
            assert not any(numbers(metric.value)), metric.name
    seen = values(engine)
    assert seen["vllm:num_preemptions"] > 0 and seen["vllm:spec_decode_num_accepted_tokens"] > 0
    assert seen["vllm:num_requests_running"] == seen["vllm:num_requests_waiting"] == 0


def test_h27_a_vector_is_as_long_as_the_method_is_deep(faults):
    asks = [faults.ask(faults.prompt(1), max_tokens=12)]
    for drafter, depth in (("eagle-fixed-tree", 4), ("eagle3-grown-tree", 3), ("medusa", 3), ("ngram", 4)):
        engine = faults.engine(faults.drafter(drafter, (), K))
        assert counts(engine)["per_pos"] == [0] * depth
        engine.generate(asks)
        assert len(counts(engine)["per_pos"]) == depth


def test_h27_no_speculation_no_figures_of_it(faults):
    engine = faults.plain()
    engine.generate([faults.ask(faults.prompt(0), max_tokens=4)])
    of_speculation = ("spec_decode", "draft", "bonus", "discarded", "propose", "shadow")
    shown = [name for name in values(engine) if any(word in name for word in of_speculation)]
    assert not shown
    config = faults.drafter("oracle", (), K)
    names = set(values(faults.engine(config)))
    assert {
        "specdecode:drafts_dropped_by_fault",
        "specdecode:proposer_failures",
        "specdecode:propose_seconds",
    } <= names


def test_h27_what_a_proposer_counts_is_shown_under_its_method(faults):
    """A reading that is no number a dashboard could draw is left out."""
    engine = faults.engine(faults.drafter("ngram", (), K), recorded=False)
    engine.generate([faults.ask([5, 6, 5, 6, 5], max_tokens=6)])
    shown = values(engine)
    own = engine.core.drafting.proposer.proposer.metrics()
    assert own and {name: shown[f"ngram.{name}"] for name in own} == own
    engine.core.drafting.proposer.proposer.metrics = lambda: {"rate": math.nan, "hits": 3}
    shown = values(engine)
    assert shown["ngram.hits"] == 3 and "ngram.rate" not in shown
