"""H26: structured output with drafts.

An illegal draft must neither crash the engine nor change the output, drafts behind the grammar's end
are not consumed, the next step finds the grammar where the output stands, and the log is not flooded.
"""

from __future__ import annotations

import json
import logging
import re
from typing import Any

import pytest

SCHEMA = {
    "type": "object",
    "properties": {"id": {"type": "integer", "minimum": 0, "maximum": 99}, "kind": {"enum": ["a", "bc"]}},
    "required": ["id", "kind"],
    "additionalProperties": False,
}
CHOICES = ["north", "north-east", "south"]
K = 4
EOS = 2


def follows_schema(text: str) -> bool:
    import jsonschema

    jsonschema.validate(json.loads(text), SCHEMA)
    return True


WISHES: dict[str, tuple[dict[str, Any], Any]] = {
    "choice": ({"choice": CHOICES}, CHOICES.__contains__),
    "regex": ({"regex": "[0-9]{3}"}, re.compile("[0-9]{3}").fullmatch),
    "json": ({"json": SCHEMA, "disable_any_whitespace": True}, follows_schema),
}


def token(text: str) -> int:
    """Of one byte: the tokens of TINY are bytes."""
    return text.encode()[0] + 3


#: What a drafter may come with that no grammar here allows where it stands, or only at the end.
ILLEGAL = {"letter": token("z"), "newline": token("\n"), "eos": EOS, "pad": 0, "digit": token("7")}


@pytest.fixture
def asks(faults):
    """Each wish, greedy and seeded, between two free-form neighbours."""

    def ask(index: int, **params: Any) -> Any:
        return faults.ask(faults.prompt(index), **({"max_tokens": 30} | params))

    wishes = [wish for wish, _ in WISHES.values()]
    return [
        ask(2),
        *(ask(1, structured_outputs=wish) for wish in wishes),
        *(ask(0, structured_outputs=wish, temperature=1.0, seed=8) for wish in wishes),
        ask(1, temperature=0.9, seed=3),
    ]


def past_the_end(asks, base) -> list[list[int]]:
    """What BASE gave, and then text that the grammars would never go on with."""
    more = [token(c) for c in "77} eastz"]
    return [
        ask.prompt + list(output.outputs[0].token_ids) + more for ask, output in zip(asks, base, strict=True)
    ]


def check(asks, got, base, same):
    same(got, base)
    validators = [valid for _, valid in WISHES.values()] * 2
    for output, valid in zip(got[1:-1], validators, strict=True):
        assert valid(output.outputs[0].text)
        assert output.outputs[0].finish_reason == "stop" and output.outputs[0].error is None
    assert all(output.outputs[0].finish_reason == "length" for output in (got[0], got[-1]))


@pytest.mark.parametrize(
    ("what", "late"), [*((what, False) for what in ILLEGAL), ("letter", True), ("eos", True)]
)
@pytest.mark.parametrize("at", range(K))
def test_h26_an_illegal_draft_at_each_offset(faults, same, caplog, asks, at, what, late):
    """The drafts before it are legal, and those behind it would have been."""
    base = faults.base(asks)
    texts = past_the_end(asks, base)
    config = {"method": "faults-puppet", "num_speculative_tokens": K, "token": ILLEGAL[what], "texts": texts}
    engine = faults.engine(config | {"at": [at]}, async_scheduling=late)
    with caplog.at_level(logging.INFO, "specdecode"):
        check(asks, engine.generate(asks), base, same)
    assert not [record for record in caplog.records if "structured" in record.getMessage()]
    by_place = engine.metric("vllm:spec_decode_num_accepted_tokens_per_pos")
    assert engine.drafted > 0 and all(by_place[:at])
    if not any(ILLEGAL[what] in output.outputs[0].token_ids for output in base):
        assert not any(by_place[at:])  # none of them counts as accepted


@pytest.mark.parametrize("what", ILLEGAL)
def test_h26_nothing_but_illegal_drafts(faults, same, asks, what):
    engine = faults.engine(
        {"method": "faults-puppet", "num_speculative_tokens": K, "token": ILLEGAL[what], "texts": []}
    )
    base = faults.base(asks)
    check(asks, engine.generate(asks), base, same)
    said = [list(output.outputs[0].token_ids).count(ILLEGAL[what]) for output in base]
    assert engine.drafted > 0 and engine.accepted <= sum(said)


@pytest.mark.parametrize("k", [1, 2, 16])
def test_h26_drafts_past_the_end(faults, same, asks, k):
    """With k=16 outputs end within one block; with 1 and 2 the grammar is taken up again step by step."""
    base = faults.base(asks)
    config = {"method": "faults-puppet", "num_speculative_tokens": k, "token": 0}
    engine = faults.engine(config | {"texts": past_the_end(asks, base)})
    check(asks, engine.generate(asks), base, same)
    assert engine.accepted > 20


def test_h26_every_drafter(faults, same, asks, drafter):
    base = faults.base(asks)
    engine = faults.engine(faults.drafter(drafter, past_the_end(asks, base)), recorded=False)
    check(asks, engine.generate(asks), base, same)
    assert engine.drafts > 0


def test_h26_a_request_that_cannot_go_on_says_so_once(faults, caplog):
    """No token is left where allowed_token_ids and the grammar contradict each other: an error, one line."""
    prompt = faults.prompt(1)
    stuck = faults.ask(
        prompt,
        structured_outputs={"regex": "[0-9]{3}"},
        logit_bias={},
        allowed_token_ids=[token("5"), token("x")],
        bad_words=["5"],
    )
    free = faults.ask(prompt, max_tokens=8)
    engine = faults.engine({"method": "faults-puppet", "num_speculative_tokens": K, "token": token("5")})
    with caplog.at_level(logging.INFO, "specdecode"):
        got = engine.generate([stuck, free])
    assert got[0].outputs[0].finish_reason == "error" and "structured_outputs" in got[0].outputs[0].error
    assert got[1].outputs[0].token_ids == faults.base([free])[0].outputs[0].token_ids
    assert len([record for record in caplog.records if "structured" in record.getMessage()]) <= 1
