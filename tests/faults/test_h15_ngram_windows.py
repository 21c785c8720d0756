"""H15: both bounds of prompt lookup count, defaults are as documented, nothing is read past the end.

Where the text ends before ``k`` tokens follow the match, ours goes on from the match again; that is
documented, and no token comes from behind the end. Fewer are drafted behind a match shorter than
``prompt_lookup_max``: documented, too.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

K = 4
README = Path(__file__).parents[2] / "plugins" / "ngram" / "README.md"


def drafts(faults, text, **fields):
    """What ngram drafts behind ``text``, as the engine is given it."""
    ids = [100 + token for token in text]
    config = {"method": "ngram", "num_speculative_tokens": K} | fields
    engine = faults.engine(config)
    # The last token of the text is drawn, so that drafting begins right behind it.
    engine.generate([faults.ask(ids[:-1], max_tokens=K + 3, allowed_token_ids=ids[-1:])])
    (found,) = [draft.ids for draft in engine.recording.drafts if list(draft.history) == ids]
    return [token - 100 for token in found]


@pytest.mark.parametrize(
    ("text", "low", "high", "want"),
    [
        pytest.param("12398123", 2, 3, "9812", id="what-followed"),
        pytest.param("12398123", 4, 4, "", id="no-window-of-four"),
        pytest.param("12398123", 3, 3, "9812", id="one-window"),
        pytest.param("123456", 2, 3, "", id="the-tail-does-not-match-itself"),
        pytest.param("1237923812341236", 1, 1, "", id="a-token-seen-once"),
        pytest.param("12379238123", 2, 3, "7923", id="the-longest-wins"),
        pytest.param("12379238123", 2, 2, "8123", id="up-to-max"),
        pytest.param("93895943", 2, 3, "", id="down-to-min"),
        pytest.param("93895943", 1, 3, "8", id="below-which-it-would-match"),
        pytest.param("127128912", 2, 2, "8912", id="of-equals-the-most-recent"),
        pytest.param("1212", 2, 2, "1212", id="a-match-at-the-end-goes-round"),
        pytest.param("777", 1, 2, "7777", id="one-token-goes-round"),
    ],
)
def test_h15_windows(faults, text, low, high, want):
    found = drafts(faults, map(int, text), prompt_lookup_min=low, prompt_lookup_max=high)
    assert found == list(map(int, want))


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({}, (2, 5)),
        ({"prompt_lookup_max": 4}, (2, 4)),
        ({"prompt_lookup_max": 1}, (1, 1)),
        ({"prompt_lookup_min": 1}, (1, 5)),
        ({"prompt_lookup_min": 7}, (7, 7)),
    ],
)
def test_h15_defaults(faults, fields, windows):
    """By their effect: matches of ``min - 1`` tokens are none, and the longest taken has ``max`` tokens."""
    low, high = windows
    run = list(range(20, 20 + high))
    # Behind a longer match stands 1, behind one of `high` tokens, which is more recent, 2.
    longer = [19, *run, 1, 2, 3, 4, 18, *run, 2, 3, 4, 5, 19, *run]
    assert drafts(faults, longer, **fields) == [2, 3, 4, 5]
    shorter = [18, *run[1:], 3, 4, 5, 6, 19, *run[1:]] if high > low else None
    if shorter:
        assert drafts(faults, [17, *run, 1, 2, 3, 4, *shorter[:-1], *run[-1:], 30, *run], **fields)[0] == 1
    least = run[:low]
    trusted = K if low == high else 1 << max(low - 2, 0)  # behind a match shorter than the longest window
    assert drafts(faults, [9, *least, 1, 2, 3, 4, 8, *least], **fields) == [1, 2, 3, 4][:trusted]
    if low > 1:
        assert drafts(faults, [9, *least[1:], 1, 2, 3, 4, 8, *least[1:]], **fields) == []


def test_h15_documented_defaults():
    """The manual, the descriptions of the fields and the windows in force agree."""
    from specdec_ngram.config import NgramConfig
    from specdecode.config import fields_of

    low, high = NgramConfig(num_speculative_tokens=1).windows
    table = dict(re.findall(r"\| `(prompt_lookup_\w+)` \| (\d+)", README.read_text(encoding="utf-8")))
    assert table == {"prompt_lookup_min": str(low), "prompt_lookup_max": str(high)}
    described = {field.name: field.doc for field in fields_of(NgramConfig)}
    assert f"none: {low}" in described["prompt_lookup_min"]
    assert f"none: {high}" in described["prompt_lookup_max"]


@pytest.mark.parametrize(
    ("fields", "needles"),
    [
        (
            {"prompt_lookup_min": 4, "prompt_lookup_max": 3},
            ["prompt_lookup_min", "at most prompt_lookup_max (3)", "4"],
        ),
        ({"prompt_lookup_min": 0}, ["prompt_lookup_min", "between 1 and 32", "0"]),
        ({"prompt_lookup_max": 0}, ["prompt_lookup_max", "between 1 and 32", "0"]),
        ({"prompt_lookup_min": -1}, ["prompt_lookup_min", "between 1 and 32", "-1"]),
        ({"prompt_lookup_max": -2}, ["prompt_lookup_max", "between 1 and 32", "-2"]),
        ({"prompt_lookup_max": 33}, ["prompt_lookup_max", "between 1 and 32", "33"]),
        ({"prompt_lookup_min": 2.0}, ["prompt_lookup_min", "integer", "2.0"]),
        ({"prompt_lookup_max": True}, ["prompt_lookup_max", "integer", "True"]),
    ],
)
def test_h15_bad_bounds(faults, fields, needles):
    with pytest.raises(ValueError) as caught:
        faults.engine({"method": "ngram", "num_speculative_tokens": K, **fields}, recorded=False)
    assert all(needle in str(caught.value) for needle in ["speculative_config", *needles])
