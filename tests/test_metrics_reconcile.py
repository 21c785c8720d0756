"""Sums of the metrics are the tokens users got, whatever ended their requests and whoever drafted."""

from __future__ import annotations

import math
from collections import Counter

import attrs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

EOS = 2
LETTERS = [3 + byte for byte in b"abcdefgh .,"]
LENGTH = 14

METHODS = (
    "oracle", "liar", "ragged", "oracle-tree", "ngram", "self-draft", "small-draft", "eagle",
    "eagle-fixed-tree", "eagle-grown-tree", "eagle3", "eagle3-grown-tree", "medusa", "cascade",
    "cascade-on-device", "none",
)  # fmt: skip
ENDINGS = ("length", "error", "stop-id", "stop-string", "eos", "min-tokens")

add = st.tuples(
    st.just("add"),
    st.integers(0, 3),  # prompt
    st.booleans(),  # seeded
    st.sampled_from((1, 1, 1, 2, 3)),  # completions
    st.sampled_from(ENDINGS),
    st.integers(0, LENGTH - 2),  # where it ends
)
step = st.tuples(st.just("step"), st.integers(1, 5))
abort = st.tuples(st.just("abort"), st.integers(0, 9))


def at(place, change):
    """A processor that does something to the logits of the output's token at ``place``."""

    def process(output_ids, logits):
        return change(logits) if len(output_ids) == place else logits

    return process


def favour_eos(logits):
    logits[EOS] = 1e6
    return logits


def fail(logits):
    raise RuntimeError("broken on purpose")


def ask_of(lab, index, seeded, completions, ending, where):
    """A request that ends in a given way, and the one that goes on to its length."""
    law = {"temperature": 0.9, "seed": 5} if seeded else {"temperature": 0.0}
    law |= {"max_tokens": LENGTH, "allowed_token_ids": [*LETTERS, EOS], "logit_bias": {EOS: -100.0}}
    base = lab.ask(lab.prompt(index), **law)
    ids = lab.expected(base)
    changes = {
        "length": {"max_tokens": where + 1},
        "stop-id": {"stop_token_ids": [ids[where]]},
        "stop-string": {"stop": ["".join(chr(token - 3) for token in ids[where : where + 2])]},
        "eos": {"logits_processors": [at(where, favour_eos)]},
        "error": {"logits_processors": [at(where, fail)]},
        "min-tokens": {"min_tokens": where, "stop_token_ids": [ids[0], ids[where]]},
    }[ending]
    return base, lab.ask(base.prompt, **(law | changes), n=completions)


@attrs.define
class Seen:
    """What a user got of a request."""

    prompt_len: int
    completions: int
    tokens: Counter = attrs.field(factory=Counter)  #: completion -> tokens
    drafts: int = 0  #: tokens that came as accepted drafts
    metrics: object = None
    finished: bool = False


def numbers(value):
    if isinstance(value, dict):
        return [number for part in value.values() for number in numbers(part)]
    return list(value) if isinstance(value, list) else [value]


def read(rig):
    """The metrics, which another reading repeats; all of them numbers."""
    metrics = rig.llm.get_metrics()
    assert metrics == rig.llm.get_metrics()
    assert all(math.isfinite(number) for metric in metrics for number in numbers(metric.value))
    return metrics


def assert_grown(before, after, depth):
    for old, new in zip(before, after, strict=True):
        assert (old.name, old.labels) == (new.name, new.labels)
        if type(new).__name__ in ("Counter", "Vector", "Histogram"):
            assert all(a <= b for a, b in zip(numbers(old.value), numbers(new.value), strict=True)), new.name
        if new.name.endswith("per_pos"):
            assert len(new.value) == depth


def test_sums_reconcile(lab):
    """60 workloads; together they hold everything that a count could trip over."""
    happened: Counter = Counter()

    @settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(
        operations=st.lists(st.one_of(add, add, add, step, abort), min_size=4, max_size=14),
        method=st.sampled_from(METHODS),
        order=st.sampled_from(("plain", "late")),
        blocks=st.sampled_from((300, 17, 24)),
        budget=st.sampled_from((12, 64)),
        shadow=st.booleans(),
    )
    def workload(operations, method, order, blocks, budget, shadow):
        happened.update(check_workload(lab, operations, method, order, blocks, budget, shadow))

    workload()
    wanted = {"stop", "length", "error", "aborted", "preempted", "discarded", "bonus", "shadow", "hits"}
    assert wanted <= set(+happened), happened


def check_workload(lab, operations, method, order, blocks, budget, shadow):
    """Run a workload and reconcile the metrics; returns how often what happened."""
    from specdecode import RequestOutputKind

    asks = {
        f"q{number}": ask_of(lab, *operation[1:])
        for number, operation in enumerate(operations)
        if operation[0] == "add"
    }
    config = lab.config(method, lab.texts([base for base, _ in asks.values()]))
    rig = lab.rig(
        config,
        (),
        order,
        recorded=False,
        num_gpu_blocks_override=blocks,
        max_num_batched_tokens=budget,
        max_model_len=64,
        skip_tokenizer_init=False,
        shadow_rate=0.5 if shadow and config is not None else 0.0,
    )
    drafting = rig.core.drafting
    depth = drafting.needs.depth if drafting else 0
    with rig:
        seen: dict[str, Seen] = {}
        before = read(rig)
        ends: Counter = Counter()

        def run(steps):
            nonlocal before
            for _ in range(steps):
                for output in rig.llm.llm_engine.step():
                    own = seen[output.request_id]
                    for completion in output.outputs:
                        own.tokens[completion.index] += len(completion.token_ids)
                        own.drafts += completion.token_sources.count("draft")
                        if output.finished:
                            ends[completion.finish_reason] += 1
                    own.metrics, own.finished = output.metrics, output.finished
                after = read(rig)
                assert_grown(before, after, depth)
                before = after

        for number, operation in enumerate(operations):
            if operation[0] == "add":
                _, ask = asks[f"q{number}"]
                seen[f"q{number}"] = Seen(len(ask.prompt), ask.params.n)
                params = ask.params.clone(output_kind=RequestOutputKind.DELTA)
                rig.llm.llm_engine.add_request(f"q{number}", {"prompt_token_ids": ask.prompt}, params)
            elif operation[0] == "step":
                run(operation[1])
            else:
                rig.abort(f"q{operation[1]}")
        steps = 0
        while rig.llm.llm_engine.has_unfinished_requests():
            run(1)
            steps += 1
            assert steps < 2000
        reconcile(rig, list(seen.values()), drafting)
        return ends + Counter(
            aborted=sum(not own.finished for own in seen.values()),
            preempted=int(rig.metric("vllm:num_preemptions")),
            discarded=int(rig.metric("specdecode:discarded_tokens")),
            bonus=int(rig.metric("specdecode:bonus_tokens")),
            shadow=int(rig.metric("specdecode:shadow_checked")),
            hits=int(rig.metric("vllm:prefix_cache_hits")),
        )


def reconcile(rig, seen, drafting):
    """Every identity of ``docs/metrics.md``."""
    value = {metric.name: metric.value for metric in rig.llm.get_metrics()}
    returned = sum(own.tokens.total() for own in seen)
    begun = sum(count > 0 for own in seen for count in own.tokens.values())
    assert value["vllm:generation_tokens"] == returned
    # A prompt whose last token is computed alone may have drafts behind it, so that its first forward
    # gives more than the first token.
    depth = drafting.needs.depth if drafting else 0
    assert 0 <= returned - begun - value["specdecode:decode_tokens"] <= depth * begun
    assert value["vllm:time_to_first_token_seconds"]["count"] == begun
    assert (
        value["vllm:prompt_tokens"] == value["vllm:prefix_cache_queries"] >= value["vllm:prefix_cache_hits"]
    )
    assert value["vllm:num_requests_running"] == value["vllm:num_requests_waiting"] == 0
    told = [own.metrics for own in seen if own.metrics is not None]
    assert (
        sum(own.steps for own in told)
        == value["specdecode:decode_steps"]
        <= value["specdecode:decode_tokens"]
    )
    if all(own.finished for own in seen):
        completions = sum(own.completions for own in seen)
        assert value["vllm:prompt_tokens"] == sum(own.prompt_len * own.completions for own in seen)
        assert value["vllm:e2e_request_latency_seconds"]["count"] == completions
        assert value["vllm:num_preemptions"] == sum(own.preemptions for own in told)
    if drafting is None:
        assert not any("draft" in name or "spec_decode" in name for name in value)
        assert not any(own.drafts or own.metrics.drafted for own in seen if own.metrics)
        return
    drafts, tokens, accepted, per_pos = (
        value[f"vllm:spec_decode_num_{name}"]
        for name in ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
    )
    bonus, discarded = value["specdecode:bonus_tokens"], value["specdecode:discarded_tokens"]
    assert accepted == sum(own.drafts for own in seen) == sum(per_pos) <= returned
    assert per_pos == sorted(per_pos, reverse=True) and (not drafts or per_pos[0] <= drafts)
    assert accepted + discarded <= tokens <= drafts * drafting.needs.width
    assert value["specdecode:draft_step_tokens"] == accepted + bonus and bonus <= drafts <= tokens
    assert bonus + accepted <= returned
    for name, total in (
        ("drafted", tokens),
        ("accepted", accepted),
        ("discarded", discarded),
        ("bonus", bonus),
        ("draft_steps", drafts),
    ):
        assert sum(getattr(own, name) for own in told) == total, name
    for own in told:
        assert own.acceptance_length is None or 0 <= own.acceptance_length <= drafting.needs.depth + 1
