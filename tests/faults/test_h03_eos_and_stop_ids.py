"""H03: nothing comes behind an EOS or a stop id, at whatever offset of an accepted block it stands."""

from __future__ import annotations

import pytest

K = 6
EOS = 2
LETTERS = [3 + byte for byte in b"abcdefghijklmnopqrst"]
LOOP = [EOS, *LETTERS]
STOP = LETTERS[4]


@pytest.fixture(scope="module")
def loop(fault_lab):
    """Greedy output goes round ``LOOP``, EOS included."""
    from specdecode.testing.tiny import favour

    return fault_lab.table(favour(dict(zip(LOOP, [*LOOP[1:], LOOP[0]], strict=True))))


def _rounds_before(token, offset):
    """Two rounds of the loop that end so that ``token`` is output number ``offset``."""
    place = LOOP.index(token) - offset
    return [LOOP[(place + step) % len(LOOP)] for step in range(2 * len(LOOP))]


def _run(faults, same, loop, drafter, late, asks):
    texts = faults.texts(asks, model=loop)
    engine = faults.engine(faults.drafter(drafter, texts, K), model=loop, async_scheduling=late)
    outputs = engine.generate(asks)
    same(outputs, faults.base(asks, model=loop))
    if drafter in ("oracle", "ngram", "self-draft"):
        assert engine.accepted > 0
    return [output.outputs[0] for output in outputs]


@pytest.mark.parametrize("late", [False, True], ids=["plain", "late"])
@pytest.mark.parametrize("drafter", ["oracle", "ngram", "self-draft"])
def test_h03_nothing_behind_the_end_at_any_offset(faults, same, loop, drafter, late):
    """An EOS, then a stop id, in each slot of an accepted block."""
    for last in (EOS, STOP):
        for offset, (ended, _) in enumerate(_ended(faults, same, loop, drafter, late, last, range(K + 3))):
            assert ended.token_sources == ["target", *["draft"] * K, "target", "draft"][: offset + 1]


def test_h03_nothing_behind_the_end(faults, same, loop, drafter):
    _ended(faults, same, loop, drafter, False, EOS, (0, 1, 3, K))
    _ended(faults, same, loop, drafter, True, STOP, (2, K + 1))


def _ended(faults, same, loop, drafter, late, last, offsets):
    """Requests that end at ``offsets``, each with a neighbour that ignores the end.

    Offset 0 comes from the prompt, then each draft's, the bonus slot's, and the next block's first.
    """
    asks = []
    for offset in offsets:
        prompt = _rounds_before(last, offset)
        end = {"ignore_eos": True, "stop_token_ids": [STOP]} if last == STOP else {}
        asks.append(faults.ask(prompt, max_tokens=20, logprobs=0, **end))
        asks.append(faults.ask(prompt, max_tokens=20, ignore_eos=True))
    completions = _run(faults, same, loop, drafter, late, asks)
    pairs = list(zip(completions[::2], completions[1::2], strict=True))
    for offset, (ended, neighbour) in zip(offsets, pairs, strict=True):
        ids = list(neighbour.token_ids)
        assert len(ids) == 20 and ids[offset] == last and neighbour.finish_reason == "length"
        assert list(ended.token_ids) == ids[: offset + 1]
        assert (ended.finish_reason, ended.stop_reason) == ("stop", None if last == EOS else STOP)
        assert len(ended.logprobs) == len(ended.token_sources) == offset + 1
    return pairs


def test_h03_the_text_of_the_end_and_the_first_of_two(faults, same, loop, drafter):
    """The stop token's text is cut or kept, the ids are the same; an EOS and a stop id in one block."""
    at_three, eos_first, stop_first = _rounds_before(STOP, 3), _rounds_before(EOS, 2), _rounds_before(STOP, 2)
    asks = [
        faults.ask(at_three, max_tokens=20, stop_token_ids=[STOP]),
        faults.ask(at_three, max_tokens=20, stop_token_ids=[STOP], include_stop_str_in_output=True),
        faults.ask(eos_first, max_tokens=20, stop_token_ids=[STOP]),
        faults.ask(stop_first, max_tokens=20, stop_token_ids=[STOP, LETTERS[6]]),
    ]
    cut, kept, eos, stop = _run(faults, same, loop, drafter, False, asks)
    assert (cut.text, kept.text) == ("bcd", "bcde")
    assert list(cut.token_ids) == list(kept.token_ids)
    assert (eos.token_ids[-1], eos.stop_reason, len(eos.token_ids)) == (EOS, None, 3)
    assert (stop.token_ids[-1], stop.stop_reason, len(stop.token_ids)) == (STOP, STOP, 3)
