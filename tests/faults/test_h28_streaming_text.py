"""H28: no character of a stream is broken, lost or doubled, and nothing of a stop string is sent.

Byte-level text through every drafter; other tokenizers, and any text in any steps, are in
``tests/streaming``.
"""

from __future__ import annotations

import pytest

TEXT = "A 世a🙂b é"
REPLACEMENT = "\ufffd"


def bytes_of(text):
    return [3 + byte for byte in text.encode()]  # ids of a tiny checkpoint


def forced(ids):
    """A logits processor that lets nothing be said but ``ids``."""

    def force(output_ids, logits):
        logits[:] = -float("inf")
        logits[ids[min(len(output_ids), len(ids) - 1)]] = 0.0
        return logits

    return force


def stream(engine, prompt, ids, **params):
    """The deltas of a request that says ``ids``."""
    from specdecode import RequestOutputKind, SamplingParams

    wish = SamplingParams(
        **{"temperature": 0.0, "ignore_eos": True, "max_tokens": len(ids)} | params,
        logits_processors=[forced(ids)],
        output_kind=RequestOutputKind.DELTA,
    )
    llm, deltas = engine.llm.llm_engine, []
    llm.add_request("stream", {"prompt_token_ids": prompt}, wish)
    while llm.has_unfinished_requests():
        deltas += [output.outputs[0] for output in llm.step()]
    return deltas


@pytest.mark.parametrize("size", range(1, 7))
def test_h28_in_blocks_of(faults, size):
    """An oracle makes every step bring ``size`` tokens."""
    prompt, ids = bytes_of("x:"), bytes_of(TEXT)
    engine = faults.engine(faults.drafter("oracle", [prompt + ids], max(1, size - 1)))
    deltas = stream(engine, prompt, ids, speculation=size - 1)
    assert "".join(delta.text for delta in deltas) == TEXT
    assert [len(delta.token_ids) for delta in deltas[1:-1]] == [size] * (len(deltas) - 2)
    done = 0
    for delta in deltas:
        before = TEXT.encode()[:done].decode(errors="ignore")
        done += len(delta.token_ids)
        assert before + delta.text == TEXT.encode()[:done].decode(
            errors="ignore"
        )  # all that is whole is sent


def test_h28_with_every_drafter(faults, drafter):
    """The text is in the prompt, so that ngram drafts it; then it ends inside a character."""
    prompt, ids = bytes_of(f"{TEXT} {TEXT} "), bytes_of(TEXT)
    engine = faults.engine(faults.drafter(drafter, [prompt + ids], 5))
    deltas = stream(engine, prompt, ids)
    assert "".join(delta.text for delta in deltas) == TEXT
    assert not any(REPLACEMENT in delta.text for delta in deltas)
    cut = bytes_of("A 世a🙂")[:-1]
    deltas = stream(engine, prompt, cut)
    assert "".join(delta.text for delta in deltas) == "A 世a" + REPLACEMENT
    assert not any(REPLACEMENT in delta.text for delta in deltas[:-1])
    if drafter in ("ngram", "oracle", "ragged", "oracle-tree"):
        assert engine.accepted > 0


@pytest.mark.parametrize("size", range(1, 7))
@pytest.mark.parametrize("stop", ["世a🙂", "🙂b", " é", "b é"])
@pytest.mark.parametrize("include", [False, True])
def test_h28_a_stop_over_chunks(faults, size, stop, include):
    prompt, ids = bytes_of("x:"), bytes_of(TEXT)
    engine = faults.engine(faults.drafter("oracle", [prompt + ids], max(1, size - 1)))
    deltas = stream(engine, prompt, ids, speculation=size - 1, stop=stop, include_stop_str_in_output=include)
    start = TEXT.index(stop)
    want = TEXT[: start + len(stop) * include]
    text = ""
    for delta in deltas:
        text += delta.text
        assert want.startswith(text)
    assert (text, deltas[-1].finish_reason, deltas[-1].stop_reason) == (want, "stop", stop)


def test_h28_what_is_held_back_comes_when_no_stop_does(faults, drafter):
    """At the latest with the token that rules the stop out, and at the end of the output."""
    said = "ab STO ab ST"
    prompt, ids = bytes_of(f"{said} {said} "), bytes_of(said)
    engine = faults.engine(faults.drafter(drafter, [prompt + ids], 5))
    deltas, done, text = stream(engine, prompt, ids, stop="STOP"), 0, ""
    for delta in deltas:
        done += len(delta.token_ids)
        text += delta.text
        held = next((n for n in (3, 2, 1) if said[:done].endswith("STOP"[:n])), 0)
        assert text == (said[:done] if delta is deltas[-1] else said[: done - held])
    assert text == said and deltas[-1].finish_reason == "length"
