"""Speculation changes no output: ids, text, reasons, logprobs; at each draft offset and in the bonus slot."""

from __future__ import annotations

import attrs
import pytest

K = 4
in_both_orders = pytest.mark.parametrize("order", ["plain", "late"])


# -- the test that a biased verifier fails -----------------------------------------------------------
@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """A target whose next token depends on the last one alone, so that all laws are wide and known."""
    from specdecode.testing.tiny import tiny_checkpoint

    return tiny_checkpoint(tmp_path_factory.mktemp("table"), zero_outputs=True, lm_head_scale=4.0)


@pytest.fixture(scope="module")
def sampled(lab, table):
    """48 seeded requests at temperature 1, and what plain decoding makes of them."""
    asks = [
        lab.ask([40, 41, 42, 40 + seed % 3, 41], temperature=1.0, seed=seed, max_tokens=18)
        for seed in range(48)
    ]
    return asks, _generate(_llm(table), asks)


def _llm(path, config=None, order="plain", **options):
    from specdecode import LLM

    defaults = {"dtype": "float32", "num_gpu_blocks_override": 200, "max_num_seqs": 8, "max_model_len": 128}
    return LLM(
        str(path),
        speculative_config=config,
        async_scheduling=order == "late",
        **({"skip_tokenizer_init": True} | defaults | options),
    )


def _generate(llm, asks):
    prompts = [{"prompt_token_ids": ask.prompt} for ask in asks]
    return llm.generate(prompts, [ask.params for ask in asks], use_tqdm=False)


def _ids(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


def _metric(llm, name):
    return next(metric.value for metric in llm.get_metrics() if metric.name == name)


def _differing(llm, sampled):
    """How many requests drew other tokens than without speculation."""
    asks, plain = sampled
    return sum(got != want for got, want in zip(_ids(_generate(llm, asks)), _ids(plain), strict=True))


def _oracle(sampled, wrong_at):
    asks, plain = sampled
    texts = [ask.prompt + ids for ask, ids in zip(asks, _ids(plain), strict=True)]
    return {
        "method": "scripted-oracle",
        "texts": texts,
        "wrong_at": wrong_at,
        "num_speculative_tokens": K,
    }


@in_both_orders
@pytest.mark.parametrize("offset", [*range(K), None], ids=[*(f"offset{i}" for i in range(K)), "bonus-slot"])
def test_seeded_output_at_every_offset(table, sampled, offset, order):
    """The target's own token is drawn at ``offset`` of each draft, or behind a draft all of which holds."""
    llm = _llm(table, _oracle(sampled, [] if offset is None else [offset]), order)
    assert _differing(llm, sampled) == 0
    per_position = _metric(llm, "vllm:spec_decode_num_accepted_tokens_per_pos")
    reached = K if offset is None else offset
    assert all(per_position[:reached]) and not any(per_position[reached:])
    assert _metric(llm, "vllm:spec_decode_num_drafts") > 100


@in_both_orders
def test_seeded_output_under_ngram(table, sampled, order):
    config = {"method": "ngram", "num_speculative_tokens": K, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
    llm = _llm(table, config, order)
    assert _differing(llm, sampled) == 0
    assert _metric(llm, "vllm:spec_decode_num_accepted_tokens") > 0


@pytest.mark.parametrize("offset", [0, 2, None])
def test_a_biased_verifier_is_caught(table, sampled, offset):
    """One that takes a draft which the target did not draw, or another token in the bonus slot."""
    from specdecode.verify.base import Verdict

    llm = _llm(table, _oracle(sampled, [] if offset is None else [offset]))
    core = llm.llm_engine.core
    rule = core.verification.rule
    honest = rule.compare

    def credulous(targets, ids, parents):
        verdict = honest(targets, ids, parents)
        if len(verdict.accepted) == len(ids):
            return attrs.evolve(verdict, tokens=(*verdict.tokens[:-1], (verdict.tokens[-1] + 1) % 300))
        bad = len(verdict.accepted)
        return Verdict((*verdict.accepted, bad), (*verdict.tokens[:-1], ids[bad], targets[bad + 1]))

    core.verification.rule = attrs.evolve(rule, compare=credulous)
    assert _differing(llm, sampled) > 0


# -- everything a user sees ----------------------------------------------------------------------------
LETTERS = [3 + byte for byte in b"abcdefgh .,"]  # ids of a tiny checkpoint are byte + 3


def _seen(output):
    """All of a completion but the sources of its tokens."""
    completion = output.outputs[0]
    entries = [sorted(entry) for entry in completion.logprobs or ()]
    return (
        list(completion.token_ids),
        completion.text,
        completion.finish_reason,
        completion.stop_reason,
        entries,
    )


@pytest.fixture(scope="module")
def plain_llm(lab):
    return _llm(lab.target, skip_tokenizer_init=False)


def _compare(lab, plain_llm, asks, methods=("oracle", "ngram", "self-draft"), unstopped=None):
    """Run ``asks`` plain and with each method; returns the plain outputs."""
    plain = _generate(plain_llm, asks)
    known = _generate(plain_llm, unstopped or asks)
    texts = [ask.prompt + ids for ask, ids in zip(asks, _ids(known), strict=True)]
    for method in methods:
        for order in ("plain", "late"):
            config = lab.config(method, texts)
            llm = _llm(lab.target, config | {"num_speculative_tokens": 6}, order, skip_tokenizer_init=False)
            for want, got in zip(plain, _generate(llm, asks), strict=True):
                assert _seen(got) == _seen(want), method
                _close(got.outputs[0], want.outputs[0])
    return plain


def _close(got, want):
    assert (got.cumulative_logprob is None) == (want.cumulative_logprob is None)
    for mine, theirs in zip(got.logprobs or (), want.logprobs or (), strict=True):
        for token, entry in theirs.items():
            assert mine[token].logprob == pytest.approx(entry.logprob, abs=1e-4)
            assert (mine[token].rank, mine[token].decoded_token) == (entry.rank, entry.decoded_token)
    if want.cumulative_logprob is not None:
        total = sum(entry[token].logprob for token, entry in zip(got.token_ids, got.logprobs, strict=True))
        assert got.cumulative_logprob == pytest.approx(total, abs=1e-4)


def test_stop_strings_at_every_offset(lab, plain_llm):
    """A two-character stop at every place of a draft, across drafts, kept and cut off."""
    law = {"temperature": 0.8, "seed": 3, "allowed_token_ids": LETTERS, "max_tokens": 24}
    base = lab.ask(lab.prompt(1), **law)
    (output,) = _generate(plain_llm, [base])
    text = output.outputs[0].text
    assert len(text) == 24
    stops = [text[place : place + 2] for place in range(1, 15)]
    asks = [
        lab.ask(base.prompt, **law, stop=[stop], include_stop_str_in_output=kept)
        for stop in stops
        for kept in (False, True)
    ]
    outputs = _compare(lab, plain_llm, asks, unstopped=[base] * len(asks))
    assert all(o.outputs[0].finish_reason == "stop" for o in outputs)
    two = lab.ask(base.prompt, **law, stop=[stops[6], stops[4]])
    (first_wins,) = _compare(lab, plain_llm, [two], unstopped=[base])
    assert first_wins.outputs[0].stop_reason == stops[4]


def test_end_tokens_and_min_tokens(lab, plain_llm):
    """The model's EOS, forced by a bias, before and behind ``min_tokens``, and ignored."""
    asks = [
        lab.ask(lab.prompt(2), max_tokens=20, temperature=t, seed=4, logit_bias={2: bias}, **options)
        for t in (0, 1.0)
        for bias in (3.0, 100.0)
        for options in ({}, {"min_tokens": 9}, {"ignore_eos": True})
    ]
    ends = _compare(lab, plain_llm, asks)
    for ask, output in zip(asks, ends, strict=True):
        ids = output.outputs[0].token_ids
        if ask.params.ignore_eos:
            assert len(ids) == 20
        else:
            assert len(ids) >= max(1, ask.params.min_tokens)
            assert 2 not in ids[:-1]


def test_logprobs(lab, plain_llm):
    asks = [
        lab.ask(lab.prompt(index), max_tokens=16, temperature=t, seed=8, logprobs=count)
        for index, t, count in ((0, 0, 3), (1, 0.8, 5), (2, 1.0, 0), (3, 0, None))
    ]
    outputs = _compare(lab, plain_llm, asks)
    assert [len(output.outputs[0].logprobs or ()) for output in outputs] == [16, 16, 16, 0]


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 6, 7, 13])
def test_max_tokens_is_exact(lab, plain_llm, max_tokens):
    asks = [lab.ask(lab.prompt(index), temperature=0, max_tokens=max_tokens) for index in (0, 3)]
    outputs = _compare(lab, plain_llm, asks, methods=("oracle",))
    assert all(len(output.outputs[0].token_ids) == max_tokens for output in outputs)


def test_odd_prompts(lab, plain_llm):
    """One token, two equal ones, forty copies of one, shorter than any lookup; and all at once."""
    prompts = ([7], [7, 7], [9] * 40, [5, 6], [2, 1])
    asks = [lab.ask(ids, max_tokens=12, temperature=t, seed=1) for ids in prompts for t in (0, 0.9)]
    _compare(lab, plain_llm, asks, methods=("ngram", "oracle", "self-draft", "eagle-grown-tree"))


def test_a_seed_is_the_same_in_any_company(lab):
    """Alone, among seeded, unseeded and greedy neighbours, and in another order."""
    own = lab.ask(lab.prompt(3), temperature=1.0, seed=7, max_tokens=12)
    others = [
        lab.ask(lab.prompt(0), temperature=1.0, seed=8, max_tokens=9),
        lab.ask(lab.prompt(1), temperature=1.0, max_tokens=14),
        lab.ask(lab.prompt(2), temperature=0, max_tokens=11),
    ]
    llm = _llm(lab.target, lab.config("self-draft"))
    alone = _ids(_generate(llm, [own]))[0]
    assert _ids(_generate(llm, [own, *others]))[0] == alone == lab.expected(own)
    assert _ids(_generate(llm, [*others, own]))[-1] == alone


def test_unseeded_requests_share_no_stream(lab):
    ask = lab.ask(lab.prompt(3), temperature=1.0, n=2, max_tokens=12)
    llm = _llm(lab.target, lab.config("self-draft"))
    outputs = _generate(llm, [ask, ask])
    assert len({tuple(c.token_ids) for output in outputs for c in output.outputs}) == 4
