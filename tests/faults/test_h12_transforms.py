"""H12: logit_bias, min_p, allowed ids and custom processors act on every drafted row."""

from __future__ import annotations

import collections
import itertools

import pytest

K = 4
FAVOURITE, OTHER = 50, 60
LATE = ("oracle", "oracle-tree", "cascade-on-device")


@pytest.fixture(scope="module")
def fond(fault_lab):
    """One token is the favourite behind every token, with a probability of about .4."""
    from specdecode.testing.tiny import favour

    return fault_lab.table(favour(dict.fromkeys(range(300), FAVOURITE), strength=3.0))


def _insists(token):
    return {"method": "faults-puppet", "num_speculative_tokens": K, "token": token}


@pytest.mark.parametrize(
    ("offered", "at"), [(FAVOURITE, None), (FAVOURITE, 0), (FAVOURITE, 2), (FAVOURITE, K - 1), (OTHER, None)]
)
def test_h12_logit_bias(faults, same, fond, offered, at):
    """-100 on the drafter's favourite: never output anywhere; +100 on another: always.

    The drafter offers one token, always, or at one offset behind drafts that are right.
    """
    laws = [{"logit_bias": bias} for bias in ({FAVOURITE: -100}, {OTHER: 100})]
    asks = [
        faults.ask([7, 8 + index], max_tokens=40, ignore_eos=True, **law, **chance)
        for index, (law, chance) in enumerate(
            itertools.product(laws, ({}, {"temperature": 1.0, "seed": 3}, {"temperature": 1.0, "seed": 4}))
        )
    ]
    want = faults.base(asks, model=fond)
    config = _insists(offered)
    if at is not None:
        texts = [
            ask.prompt + list(output.outputs[0].token_ids) for ask, output in zip(asks, want, strict=True)
        ]
        config |= {"texts": texts, "at": [at]}
    engine = faults.engine(config, model=fond)
    outputs = engine.generate(asks)
    same(outputs, want)
    for output in outputs[:3]:
        assert FAVOURITE not in output.outputs[0].token_ids
        assert ("draft" in output.outputs[0].token_sources) == bool(at)
    for output in outputs[3:]:
        assert set(output.outputs[0].token_ids) == {OTHER}
        assert ("draft" in output.outputs[0].token_sources) == (offered == OTHER or bool(at))


def test_h12_support_at_every_offset(faults, logits, small):
    """min_p=.3 and allowed_token_ids, alone and together, under drafts always right and a gambler's."""
    configs = (
        {"method": "scripted-self-draft", "num_speculative_tokens": K},
        {
            "method": "faults-gambler",
            "num_speculative_tokens": K,
            "law": logits.tolist(),
            "temperature": 1.4,
        },
    )
    laws = (
        {"min_p": 0.3},
        {"allowed_token_ids": [3, 5, 8, 9]},
        {"min_p": 0.3, "allowed_token_ids": [3, 5, 8, 9]},
    )
    asks = [
        faults.ask([5, 7], temperature=1.0, seed=1, n=24, max_tokens=60, ignore_eos=True, **law)
        for law in laws
    ]
    for config in configs:
        engine = faults.engine(config, model=small, skip_tokenizer_init=True, recorded=False)
        seen = set()
        for law, output in zip(laws, engine.generate(asks), strict=True):
            support = [_support(row, **law) for row in logits]
            used = collections.Counter()
            for completion in output.outputs:
                ids, slot = [7, *completion.token_ids], 0
                for last, token, source in zip(ids, ids[1:], completion.token_sources, strict=False):
                    assert token in support[last], f"{law} in slot {slot}"
                    used[last, token] += 1
                    seen.add(slot)
                    slot = slot + 1 if source == "draft" else 0
            if "min_p" in law:  # no token of the support is rare: all of them come
                for last in range(12):
                    drawn = {token for before, token in used if before == last}
                    often = sum(used[last, token] for token in drawn) > 150
                    assert drawn == support[last] or not often
        assert seen == set(range(K + 1))


@pytest.fixture(scope="module")
def logits():
    import torch

    return torch.randn(12, 12, generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def small(fault_lab, logits):
    return fault_lab.table(logits)


def _support(row, min_p=0.0, allowed_token_ids=range(12)):
    """Ids that may follow: the allowed ones at least ``min_p`` times as likely as the likeliest of them."""
    import math

    best = max(row[list(allowed_token_ids)]).item()
    floor = best + math.log(min_p) if min_p else -math.inf
    return {token for token in allowed_token_ids if row[token].item() >= floor}


class Recording:
    """A processor that notes what it was shown, and bans the token before last from coming again."""

    def __init__(self):
        self.seen = []

    def __call__(self, output_ids, logits):
        self.seen.append(list(output_ids))
        if len(output_ids) > 1:
            logits[output_ids[-2]] = -1e9
        return logits


def test_h12_a_processor_sees_exactly_the_ids_before(faults, same, drafter):
    """For output i it was called once, with the i ids before it; and it acts on drafted rows as on others.

    One step late, an ended request is drawn for once more.
    """

    def asks(processors):
        return [
            faults.ask(
                faults.prompt(index), max_tokens=24, ignore_eos=True, logits_processors=[processor], **law
            )
            for index, (processor, law) in enumerate(
                zip(processors, ({}, {"temperature": 0.8, "seed": 2}), strict=True)
            )
        ]

    plain, under = ([Recording(), Recording()] for _ in range(2))
    want = faults.base(asks(plain))
    texts = [faults.prompt(index) + list(output.outputs[0].token_ids) for index, output in enumerate(want)]
    late = drafter in LATE
    engine = faults.engine(faults.drafter(drafter, texts, K), async_scheduling=late)
    same(engine.generate(asks(under)), want)
    for processor, output in zip(under, want, strict=True):
        ids = list(output.outputs[0].token_ids)
        assert processor.seen[: len(ids)] == [ids[:count] for count in range(len(ids))]
        assert len(processor.seen) <= len(ids) + K * late
    if drafter in ("oracle", "oracle-tree"):
        assert engine.accepted > 0


def test_h12_a_processor_beside_rows_without_one(faults, same):
    """Each row has its own: neighbours without a processor, and with another, are what they are alone."""

    def never(output_ids, logits):
        logits[:] = -1e9
        logits[7] = 0.0
        return logits

    laws = ({}, {"logits_processors": [never]}, {"logit_bias": {9: 100}}, {"temperature": 1.0, "seed": 5})
    asks = [
        faults.ask(faults.prompt(index), max_tokens=16, ignore_eos=True, **law)
        for index, law in enumerate(laws)
    ]
    want = faults.base(asks)
    texts = [ask.prompt + list(output.outputs[0].token_ids) for ask, output in zip(asks, want, strict=True)]
    engine = faults.engine(faults.drafter("spoiled", texts, K))
    outputs = engine.generate(asks)
    same(outputs, want)
    assert set(outputs[1].outputs[0].token_ids) == {7} and set(outputs[2].outputs[0].token_ids) == {9}
