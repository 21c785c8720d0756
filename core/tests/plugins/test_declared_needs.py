"""What a method declares wrongly is refused where it is written: the field, the value, what it must be."""

from __future__ import annotations

import pytest
from specdecode.contract import FINAL, LM_HEAD, KVSpec, Needs, Tap

KV = {"layers": 1, "heads": 2, "k_dim": 8, "v_dim": 8}


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"width": "3"}, "Needs.width must be an integer, got '3'"),
        ({"depth": 2.0}, "Needs.depth must be an integer, got 2.0"),
        ({"scratch_bytes": -1}, "Needs.scratch_bytes must be an integer of at least 0, got -1"),
        ({"place": "device"}, "Needs.place must be one of Place.HOST, Place.DEVICE, got 'device'"),
        ({"tokens": 2}, "Needs.tokens must be one of Tokens.NONE, Tokens.NEW, Tokens.HISTORY, got 2"),
        ({"ranks": None}, "Needs.ranks must be one of Ranks.LEADER, Ranks.ALL, got None"),
        ({"taps": FINAL}, r"Needs.taps must be a tuple of Tap, as in \(Tap\(...\),\), got Tap\("),
        ({"taps": ("final",)}, "Needs.taps must be a tuple of Tap, got 'final' in it"),
        ({"kv": KVSpec(**KV)}, r"Needs.kv must be a tuple of KVSpec, as in \(KVSpec\(...\),\), got KVSpec\("),
        ({"modules": LM_HEAD}, "Needs.modules must be a frozenset of names, got 'lm_head'"),
        (
            {"modules": {"lmhead"}},
            r"Needs.modules knows \['embed', 'extra_layers', 'lm_head'\], got \['lmhead'\]",
        ),
    ],
)
def test_needs(declared, message):
    with pytest.raises(ValueError, match=message):
        Needs(**{"width": 3, "depth": 3, **declared})


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"layers": 0}, "KVSpec.layers must be an integer of at least 1, got 0"),
        ({"heads": 2.0}, "KVSpec.heads must be an integer of at least 1, got 2.0"),
        ({"first": -1}, "KVSpec.first must be an integer of at least 0, got -1"),
        ({"window": 0}, "KVSpec.window must be an integer of at least 1, got 0"),
    ],
)
def test_draft_layers(declared, message):
    with pytest.raises(ValueError, match=message):
        KVSpec(**{**KV, **declared})


def test_a_boundary():
    with pytest.raises(
        ValueError, match=r"Tap\.boundary must be 'final' or the number of a block, got 'finl'"
    ):
        Tap("finl")


def test_what_is_right_is_taken():
    Needs(width=3, depth=3, modules={LM_HEAD}, taps=[FINAL, Tap(0)], kv=(KVSpec(**KV, window=16),))
