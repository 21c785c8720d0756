"""What a method declares wrongly is refused where it is written: the field, the value, what it must be."""

from __future__ import annotations

import pytest
import torch
from specdecode.api.drafter import check_needs
from specdecode.contract import FINAL, LM_HEAD, KVSpec, Needs, Tap, Unsupported
from specdecode.kv.store import draft_layers
from specdecode.verify import rule

KV = {"layers": 1, "heads": 2, "k_dim": 8, "v_dim": 8}


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"width": "3"}, "Needs.width must be of type int, got '3'"),
        ({"depth": 2.0}, "Needs.depth must be of type int, got 2.0"),
        ({"place": "device"}, "Needs.place must be of type Place, got 'device'"),
        ({"tokens": 2}, "Needs.tokens must be of type Tokens, got 2"),
        ({"ranks": None}, "Needs.ranks must be of type Ranks, got None"),
        ({"taps": FINAL}, r"Needs.taps must be a tuple of Tap, got Tap\("),
        ({"taps": ("final",)}, r"Needs.taps must be a tuple of Tap, got \('final',\)"),
        ({"kv": KVSpec(**KV)}, r"Needs.kv must be a tuple of KVSpec, got KVSpec\("),
        ({"modules": LM_HEAD}, "Needs.modules must be of type Set, got 'lm_head'"),
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
        ({"layers": 0}, "KVSpec.layers must be of type int of at least 1, got 0"),
        ({"heads": 2.0}, "KVSpec.heads must be of type int of at least 1, got 2.0"),
        ({"first": -1}, "KVSpec.first must be of type int of at least 0, got -1"),
        ({"dtype": torch.bfloat16}, r"KVSpec.dtype must be of type str \| None, got torch.bfloat16"),
    ],
)
def test_draft_layers(declared, message):
    with pytest.raises(ValueError, match=message):
        KVSpec(**{**KV, **declared})


@pytest.mark.parametrize("dtype", ["bf16", "int8", "Tensor"])
def test_a_dtype_that_layers_cannot_have_is_refused_before_weights_are_read_and_where_they_are_made(
    target, dtype
):
    spec = KVSpec(**KV, dtype=dtype)
    says = f"KVSpec.dtype '{dtype}' is no floating-point dtype of torch; say for example 'bfloat16', or None"
    with pytest.raises(Unsupported, match=f"^head declares layers that cannot be kept: {says}"):
        check_needs(Needs(width=3, depth=3, kv=(spec,)), "head", target, rule("invariant"))
    with pytest.raises(Unsupported, match=f"^{says}"):
        draft_layers(spec, torch.float32)


def test_what_is_right_is_taken():
    Needs(width=3, depth=3, modules={LM_HEAD}, taps=[FINAL, Tap(0)], kv=(KVSpec(**KV, slots=2),))
