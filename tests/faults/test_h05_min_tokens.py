"""H05: no drafted EOS, stop id or stop string ends a request before ``min_tokens``."""

from __future__ import annotations

import pytest

K = 4
EOS = 2
LEAST = 9
LETTERS = [3 + byte for byte in b"abcdefghijkl"]
TEXT = "abcdefghijkl"


@pytest.fixture(scope="module")
def eager_law():
    """EOS is the favourite behind every token, with a probability of about 0.85."""
    from specdecode.testing.tiny import favour

    return favour(dict.fromkeys(range(300), EOS), strength=5.0)


@pytest.fixture(scope="module")
def eager(fault_lab, eager_law):
    return fault_lab.table(eager_law)


@pytest.fixture(scope="module")
def loop(fault_lab):
    """Greedy output goes round the letters."""
    from specdecode.testing.tiny import favour

    return fault_lab.table(favour(dict(zip(LETTERS, [*LETTERS[1:], LETTERS[0]], strict=True))))


def _eos_at(offsets, texts=()):
    """A drafter that proposes EOS at these offsets, where BASE drew something else."""
    return {
        "method": "faults-puppet",
        "num_speculative_tokens": K,
        "token": EOS,
        "texts": texts,
        "at": list(offsets),
    }


def _asks(faults):
    """Prompts differ, so that each request has a text of its own."""
    laws = (
        {},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 1.0, "seed": 4},
        {"stop_token_ids": [40]},
    )
    return [
        faults.ask([5, 6 + index], min_tokens=LEAST, max_tokens=20, logprobs=0, **law)
        for index, law in enumerate(laws)
    ]


def _texts(asks, outputs):
    """What an oracle is told, where EOS must be no part of it."""
    return [ask.prompt + list(output.outputs[0].token_ids) for ask, output in zip(asks, outputs, strict=True)]


def _late_eos(faults, same, engine, asks, want):
    outputs = engine.generate(asks)
    same(outputs, want)
    for output in outputs:
        (completion,) = output.outputs
        assert len(completion.token_ids) > LEAST and EOS not in completion.token_ids[:LEAST]
        assert completion.finish_reason == "stop"


def test_h05_no_eos_before_min_tokens(faults, same, eager, drafter):
    asks = _asks(faults)
    want = faults.base(asks, model=eager)
    engine = faults.engine(faults.drafter(drafter, _texts(asks, want), K), model=eager)
    _late_eos(faults, same, engine, asks, want)


@pytest.mark.parametrize("late", [False, True], ids=["plain", "late"])
@pytest.mark.parametrize("offset", [*range(K), None], ids=[*(f"offset{i}" for i in range(K)), "everywhere"])
def test_h05_a_drafted_eos_ends_nothing(faults, same, eager, offset, late):
    """The drafts before it are right, so that its row is verified; from the minimum on it is right itself."""
    asks = _asks(faults)
    want = faults.base(asks, model=eager)
    config = _eos_at(range(K)) if offset is None else _eos_at([offset], _texts(asks, want))
    engine = faults.engine(config, model=eager, async_scheduling=late)
    _late_eos(faults, same, engine, asks, want)
    assert engine.drafted > engine.accepted > 0


def test_h05_stop_ids_and_strings_before_the_minimum(faults, same, loop, drafter):
    """Stop ids are not drawn before it; a stop string is, and the first that ends behind it counts."""
    prompt = LETTERS
    stops = {TEXT[at : at + 2]: at + 2 for at in range(LEAST + 1)}  # -> tokens at its first end
    asks = [faults.ask(prompt, stop=[stop], min_tokens=LEAST, max_tokens=26, logprobs=0) for stop in stops]
    ids = [
        faults.ask(prompt, stop_token_ids=[token], min_tokens=LEAST, max_tokens=26) for token in LETTERS[3:5]
    ]
    texts = faults.texts(asks + ids, model=loop)
    engine = faults.engine(faults.drafter(drafter, texts, K), model=loop)
    outputs = engine.generate(asks + ids)
    same(outputs, faults.base(asks + ids, model=loop))
    for end, output in zip(stops.values(), outputs, strict=False):
        (completion,) = output.outputs
        length = end if end > LEAST else end + len(LETTERS)
        assert (len(completion.token_ids), completion.finish_reason) == (length, "stop")
        assert completion.text == (TEXT * 3)[: length - 2]
    for token, output in zip(LETTERS[3:5], outputs[len(stops) :], strict=True):
        assert token not in output.outputs[0].token_ids[:LEAST]


def test_h05_no_eos_in_2000_sampled_runs(faults, eager, eager_law):
    """None among the first 9 tokens; the next is EOS as often as its law has it."""
    engine = faults.engine(
        _eos_at(range(K)) | {"num_speculative_tokens": 2},
        model=eager,
        recorded=False,
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        num_gpu_blocks_override=2000,
    )
    ask = faults.ask([5, 6], temperature=1.0, seed=1, n=2000, min_tokens=LEAST, max_tokens=LEAST + 1)
    (output,) = engine.generate([ask])
    runs = [list(completion.token_ids) for completion in output.outputs]
    assert len(runs) == 2000 and len(set(map(tuple, runs))) > 1900
    assert not any(EOS in run[:LEAST] for run in runs)
    chances = eager_law.softmax(-1)[[run[LEAST - 1] for run in runs], EOS]
    deviation = (chances * (1 - chances)).sum().sqrt().item()
    ended = sum(run[LEAST] == EOS for run in runs)
    assert abs(ended - chances.sum().item()) < 5 * deviation
