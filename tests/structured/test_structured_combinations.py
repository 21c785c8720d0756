"""Structure together with the other parameters, with speculation and without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest

EOS = 2
DRAFTERS = ("ngram", "oracle", "liar", "oracle-tree", "self-draft")


def token(text: str) -> int:
    """Of one byte: the tokens are bytes."""
    return text.encode()[0] + 3


def only_sevens(output_ids: Any, logits: Any) -> Any:
    """A processor that knows nothing of the grammar."""
    logits[:] = -1e9
    logits[token("7")] = 0.0
    return logits


def forces_z(output_ids: Any, logits: Any) -> Any:
    logits[:] = float("-inf")
    logits[token("z")] = 0.0
    return logits


OPEN = {"regex": "[a-c]+"}
DIGITS = {"regex": "[0-9]{3}"}
END_SOON = {EOS: 60.0}


@attrs.frozen
class Case:
    structure: dict[str, Any]
    params: dict[str, Any]
    #: of the ids without an end-of-sequence token, and (finish_reason, stop_reason)
    check: Callable[[str, list[int], tuple[Any, Any]], bool]


CASES = {
    "the end may come at once": Case(
        OPEN, {"logit_bias": END_SOON}, lambda text, ids, why: len(ids) == 2 and ids[-1] == EOS
    ),
    "min_tokens holds the end back": Case(
        OPEN,
        {"logit_bias": END_SOON, "min_tokens": 9},
        lambda text, ids, why: len(ids) == 10 and ids[-1] == EOS and why == ("stop", None),
    ),
    "min_tokens cannot prolong a text that is complete": Case(
        DIGITS, {"min_tokens": 9}, lambda text, ids, why: len(text) == len(ids) == 3 and why == ("stop", None)
    ),
    "bad_words and min_tokens leave nothing": Case(
        OPEN,
        {"min_tokens": 9, "allowed_token_ids": [token("a"), EOS], "bad_words": ["aaa"]},
        lambda text, ids, why: text == "aa" and why[0] == "error",
    ),
    "min_tokens and an end that must come": Case(
        {"regex": "a(b+)?"},
        {"min_tokens": 9, "allowed_token_ids": [token("a"), EOS]},
        lambda text, ids, why: ids == [token("a"), EOS] and why == ("stop", None),
    ),
    "max_tokens cuts": Case(DIGITS, {"max_tokens": 2}, lambda text, ids, why: why == ("length", None)),
    "max_tokens at the very end": Case(
        DIGITS, {"max_tokens": 3}, lambda text, ids, why: len(ids) == 3 and why == ("stop", None)
    ),
    "ignore_eos goes on while the grammar can": Case(
        OPEN,
        {"logit_bias": END_SOON, "ignore_eos": True},
        lambda text, ids, why: len(text) == 30 and why == ("length", None),
    ),
    "ignore_eos ends where the grammar does": Case(
        DIGITS, {"ignore_eos": True}, lambda text, ids, why: len(text) == 3 and why == ("stop", None)
    ),
    "an end-of-sequence token as a stop id": Case(
        OPEN,
        {"logit_bias": END_SOON, "ignore_eos": True, "stop_token_ids": [EOS]},
        lambda text, ids, why: len(ids) == 2 and why == ("stop", EOS),
    ),
    "a bias on what is not allowed": Case(
        OPEN, {"logit_bias": {token("z"): 100.0}}, lambda text, ids, why: set(text) <= set("abc")
    ),
    "a bias on what is allowed": Case(
        OPEN,
        {"logit_bias": {token("b"): 100.0}, "max_tokens": 7},
        lambda text, ids, why: text == "b" * 7 and why == ("length", None),
    ),
    "allowed_token_ids leave a part": Case(
        DIGITS, {"allowed_token_ids": [token("4"), token("z")]}, lambda text, ids, why: text == "444"
    ),
    "allowed_token_ids leave nothing": Case(
        DIGITS,
        {"allowed_token_ids": [token("z")]},
        lambda text, ids, why: text == "" and why[0] == "error",
    ),
    "bad_words": Case(
        {"choice": ["no", "yes"]}, {"bad_words": ["n"]}, lambda text, ids, why: text == "yes"
    ),
    "a stop string": Case(
        {"json_object": True},
        {"stop": ['"'], "logit_bias": {token('"'): 40.0}},
        lambda text, ids, why: why == ("stop", '"') and '"' not in text,
    ),
    "a stop string that the last token completes": Case(
        {"choice": ["one two"]},
        {"stop": ["two"]},
        lambda text, ids, why: text == "one " and why == ("stop", "two"),
    ),
    "a stop id": Case(
        {"choice": ["one two"]},
        {"stop_token_ids": [token("t")]},
        lambda text, ids, why: text == "one " and why == ("stop", token("t")),
    ),
    "a processor that knows nothing of the grammar": Case(
        {"regex": "[5-9]{3}x"},
        {"logits_processors": [only_sevens]},
        lambda text, ids, why: text == "777x" and why == ("stop", None),
    ),
    "a processor that leaves nothing": Case(
        DIGITS, {"logits_processors": [forces_z]}, lambda text, ids, why: ids == [] and why[0] == "error"
    ),
    "no drafts for this one": Case(DIGITS, {"speculation": False}, lambda text, ids, why: len(text) == 3),
    "no text": Case(DIGITS, {"detokenize": False}, lambda text, ids, why: text == "" and len(ids) == 3),
    "logprobs": Case(DIGITS, {"logprobs": 3}, lambda text, ids, why: len(ids) == 3),
    "penalties": Case(
        {"regex": "[ab]{8}"},
        {"frequency_penalty": 2.0, "presence_penalty": 1.0, "repetition_penalty": 1.4},
        lambda text, ids, why: {"a", "b"} == set(text),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def asks(structured):
    found = []
    for place, case in enumerate(CASES.values()):
        for chance in ({}, {"temperature": 1.0, "seed": place}):
            found.append(structured.ask(case.structure, **(chance | case.params)))
    return found


@pytest.mark.parametrize("name", CASES)
def test_it_does_what_it_says(structured, asks, name):
    place = list(CASES).index(name)
    for ask in asks[2 * place : 2 * place + 2]:
        (completion,) = structured.alone(ask).outputs
        why = completion.finish_reason, completion.stop_reason
        assert CASES[name].check(completion.text, list(completion.token_ids), why), completion
        assert (completion.error is not None) == (why[0] == "error")
        if why[0] == "error":
            assert "structured_outputs" in completion.error


@pytest.mark.parametrize("order", ["plain", "late"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_with_speculation_it_is_the_same(structured, asks, drafter, order):
    rig = structured.rig(drafter, asks, order=order)
    for ask, output in zip(asks, structured.run(rig, asks), strict=True):
        (got,), (want,) = output.outputs, structured.alone(ask).outputs
        assert (list(got.token_ids), got.text, got.finish_reason, got.stop_reason, got.error) == (
            list(want.token_ids), want.text, want.finish_reason, want.stop_reason, want.error,
        ), ask.params  # fmt: skip


def test_without_speculation_it_is_the_reference(structured, asks):
    from specdecode.testing.reference import ReferenceDecoder

    reference = ReferenceDecoder(structured.lab.model, structured.tokenizer, eos_ids=[EOS])
    for (name, case), ask in zip(((n, c) for n, c in CASES.items() for _ in range(2)), asks, strict=True):
        grammar = structured.grammar(case.structure)
        if case.params.get("ignore_eos") and EOS not in case.params.get("stop_token_ids", ()):
            everything = grammar
            grammar = lambda output, everything=everything: everything(output) - {EOS}  # noqa: E731
        (want,) = reference.request(ask.prompt, ask.params, grammar=grammar).outputs
        (got,) = structured.alone(ask).outputs
        assert list(got.token_ids) == list(want.token_ids), name
        assert (got.text, got.finish_reason, got.stop_reason) == (
            want.text,
            want.finish_reason,
            want.stop_reason,
        )


def test_logprobs_are_those_of_the_model(structured):
    """Of its own distribution: what the grammar excludes is in it."""
    free, bound = (
        structured.alone(structured.ask(wish, "logprobs", logprobs=5, prompt_logprobs=2))
        for wish in (None, DIGITS)
    )
    ours, theirs = bound.outputs[0].logprobs[0], free.outputs[0].logprobs[0]
    best = {key for key, value in theirs.items() if value.rank <= 5}
    assert {key for key, value in ours.items() if value.rank <= 5} == best
    assert all(abs(ours[key].logprob - theirs[key].logprob) < 1e-5 for key in best)
    drawn = bound.outputs[0].token_ids[0]
    assert drawn not in best and ours[drawn].rank > 5
    assert [list(row or ()) for row in bound.prompt_logprobs] == [
        list(row or ()) for row in free.prompt_logprobs
    ]


@pytest.mark.parametrize("drafter", ["none", "oracle", "oracle-tree"])
@pytest.mark.parametrize("changes", [{}, {"n": 2}, {"stop": ["ok"]}])
def test_streaming(structured, kinds, drafter, changes):
    """The deltas are the text, in every kind."""
    from specdecode import RequestOutputKind

    asks = [
        structured.ask(kind.wish, temperature=1.0, seed=6, output_kind=RequestOutputKind.DELTA, **changes)
        for kind in kinds.values()
    ]
    rig = structured.rig(drafter, asks)
    for place, ask in enumerate(asks):
        rig.add(str(place), ask)
    pieces: dict[str, list[Any]] = {}
    while rig.llm.llm_engine.has_unfinished_requests():
        for output in rig.llm.llm_engine.step():
            pieces.setdefault(output.request_id, []).append(output)
    for place, ask in enumerate(asks):
        final = structured.alone(
            attrs.evolve(ask, params=ask.params.clone(output_kind=RequestOutputKind.CUMULATIVE))
        )
        for completion in final.outputs:
            told = [output.outputs[completion.index] for output in pieces[str(place)]]
            assert "".join(piece.text for piece in told) == completion.text
            assert [token for piece in told for token in piece.token_ids] == list(completion.token_ids)
            assert told[-1].finish_reason == completion.finish_reason


BAD = {
    "regex": ({"regex": "[0-9"}, ["structured_outputs.regex='[0-9'"]),
    "json": ({"json": {"type": "objekt"}}, ["structured_outputs.json", "objekt"]),
    "grammar": ({"grammar": "start: foo"}, ["structured_outputs.grammar", "foo"]),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_compiled_is_refused_and_nobody_else_notices(structured, name):
    wish, needles = BAD[name]
    good, bad = structured.ask(DIGITS), structured.ask(wish)
    rig = structured.rig("ngram")
    with pytest.raises(ValueError):  # which generate does with every request before it queues the first
        rig.llm.llm_engine.prepare({"prompt_token_ids": bad.prompt}, bad.params)
    steps = rig.metric("specdecode:steps")
    with pytest.raises(ValueError) as caught:
        structured.run(rig, [good, bad, good])
    assert all(needle in str(caught.value) for needle in needles)
    assert rig.metric("specdecode:steps") == steps and not rig.llm.llm_engine.has_unfinished_requests()
    rig.add("running", good)
    rig.step()
    with pytest.raises(ValueError):
        rig.add("bad", bad)
    finished = rig.drain()
    assert list(finished) == ["running"]
    assert finished["running"].outputs[0].token_ids == structured.alone(good).outputs[0].token_ids


def test_without_a_tokenizer_it_is_refused(lab):
    from specdecode.contract import ConfigError

    with lab.rig(None) as rig, pytest.raises(ConfigError, match="skip_tokenizer_init"):
        rig.llm.generate(
            {"prompt_token_ids": [5, 6]},
            lab.ask([5], structured_outputs={"regex": "a"}).params,
            use_tqdm=False,
        )


def test_an_aborted_request_leaves_nothing(structured):
    rig = structured.rig("ngram")
    asks = [structured.ask(OPEN, temperature=1.0, seed=seed, ignore_eos=True) for seed in range(3)]
    for place, ask in enumerate(asks):
        rig.add(str(place), ask)
    rig.step(4)
    rig.abort("1")
    finished = rig.drain()
    assert sorted(finished) == ["0", "2"]
    for place in (0, 2):
        assert finished[str(place)].outputs[0].text == structured.alone(asks[place]).outputs[0].text


def test_a_compiled_grammar_is_kept(structured):
    engine = structured.rig("none").llm.llm_engine
    structured.run(structured.rig("none"), [structured.ask(DIGITS)])
    misses = engine._grammars._compiled.cache_info().misses
    structured.run(structured.rig("none"), [structured.ask(DIGITS, seed=seed) for seed in range(4)])
    assert engine._grammars._compiled.cache_info().misses == misses
