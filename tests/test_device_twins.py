"""What a captured step does is what the host does without one: each operation beside its twin."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specdec_kernels import sampling, verification
from specdecode.api.params import SamplingParams
from specdecode.engine.ordering import in_order
from specdecode.sampling import draw, rank
from specdecode.sampling.batch import SampleRow, SamplingBatch
from specdecode.verify.invariant import walk
from specdecode.verify.synthetic import Synthetic

torch.set_num_threads(1)
VOCABULARY = 3
seeds = st.integers(0, 2**32 - 1)


def column(values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype)


def chain(width):
    return list(range(-1, width - 1))


def random_parents(rng, width):
    return [rng.randint(-1, node - 1) for node in range(width)]


# -- sampling ---------------------------------------------------------------------------------------
PARAMS = st.builds(
    dict,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 5, 40]),
    top_p=st.sampled_from([1.0, 0.5, 0.9]),
    min_p=st.sampled_from([0.0, 0.1, 0.3]),
)


@given(st.lists(PARAMS, min_size=1, max_size=4), st.integers(1, 3), st.sampled_from([7, 300]), seeds)
@settings(max_examples=60, deadline=None)
def test_a_draw_in_one_call_is_the_samplers(rows, tokens_per_row, size, seed):
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    count = len(rows) * tokens_per_row
    logits = torch.randn(count, size, generator=generator) * 3
    logits = logits.to(rng.choice([torch.float32, torch.bfloat16]))
    logits[rng.randrange(count), rng.randrange(size)] = rng.choice([float("nan"), 0.0])
    logits[rng.randrange(count)] = rng.choice([-float("inf"), 1.0])
    own_seed = torch.randint(-(2**63), 2**63 - 1, (len(rows),), generator=generator)
    index, position = torch.arange(len(rows)), torch.arange(count) + 5
    params = [SamplingParams(**row) for row in rows]
    batch = SamplingBatch.build(
        [
            SampleRow(
                params=params[n // tokens_per_row],
                seed=int(own_seed[n // tokens_per_row]),
                index=n // tokens_per_row,
                position=n + 5,
                num_output=0,
            )
            for n in range(count)
        ],
        size,
    )
    kwargs = {
        "seed": own_seed,
        "index": index,
        "temperature": column([0.0 if own.greedy else own.temperature for own in params], torch.float32),
        "top_k": column([own.top_k for own in params]),
        "top_p": column([own.top_p for own in params], torch.float32),
        "min_p": column([own.min_p for own in params], torch.float32),
        "tokens_per_row": tokens_per_row,
    }
    assert torch.equal(sampling.draw_tokens(logits, position, **kwargs), draw(logits, batch))
    ids, scores = sampling.rank_tokens(logits, position, k=3, **kwargs)
    want, values = rank(logits, batch, 3)
    assert torch.equal(ids, want)
    torch.testing.assert_close(scores, values, rtol=0, atol=0, equal_nan=True)


# -- accepting --------------------------------------------------------------------------------------
@given(st.integers(0, 7), st.booleans(), seeds)
@settings(max_examples=200, deadline=None)
def test_accept_walks_as_the_rule_does(width, tree, seed):
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    rows, tokens = 3, width + 1
    ids = torch.randint(0, VOCABULARY, (rows, tokens), generator=generator)
    targets = torch.randint(rng.choice([0, -1]), VOCABULARY, (rows, tokens), generator=generator)
    lens = [rng.randint(0, width) for _ in range(rows)]
    parents = [random_parents(rng, width) if tree else chain(width) for _ in range(rows)]
    before = [rng.randint(1, 9) for _ in range(rows)]
    limits = [own + rng.randint(1, tokens + 2) for own in before]
    active = [rng.random() < 0.8 for _ in range(rows)]
    history = torch.randint(0, VOCABULARY, (rows, 30), generator=generator).int()
    texts = history.tolist()
    state = {"committed": column(before), "limit": column(limits), "active": column(active)}
    out = {
        "tokens": torch.empty(rows, tokens, dtype=torch.int64),
        "counts": torch.empty(rows, dtype=torch.int64),
        "path": torch.empty(rows, tokens, dtype=torch.int64),
        "result": torch.empty(rows, tokens + 3, dtype=torch.int32),
        "history": history,
    }
    given_parents = column(parents).reshape(rows, width) if tree else None
    verification.accept(targets, ids, column(lens), given_parents, **state, **out)
    for row in range(rows):
        count = lens[row]
        verdict = walk(
            targets[row, : count + 1].tolist(), ids[row, 1 : count + 1].tolist(), parents[row][:count]
        )
        commits = active[row] and verdict.tokens[-1] >= 0
        new = list(verdict.tokens)[: limits[row] - before[row]] if commits else []
        path = ([0, *(node + 1 for node in verdict.accepted)])[: len(new)] or [0]
        shown = new or [int(ids[row, 0])]
        assert out["counts"][row] == len(new)
        assert state["committed"][row] == before[row] + len(new)
        assert state["active"][row] == (commits and before[row] + len(new) < limits[row])
        assert out["tokens"][row].tolist() == shown + shown[-1:] * (tokens - len(shown))
        assert out["path"][row].tolist() == path + path[-1:] * (tokens - len(path))
        texts[row][before[row] : before[row] + len(new)] = new
        assert history[row].tolist() == texts[row]
        flag = -1 if active[row] and not commits else len(new)
        accepted = len(verdict.accepted) if commits else 0
        assert out["result"][row].tolist() == [flag, accepted, count, *out["tokens"][row].tolist()]


@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=6), seeds)
@settings(max_examples=60, deadline=None)
def test_accept_by_rates_is_the_synthetic_rule(rates, seed):
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    rows, width = 5, len(rates)
    ids = torch.randint(0, VOCABULARY, (rows, width + 1), generator=generator)
    targets = torch.randint(0, VOCABULARY, (rows, width + 1), generator=generator)
    own_seed = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)
    before = [rng.randint(1, 2**20) for _ in range(rows)]
    lens = [rng.randint(0, width) for _ in range(rows)]
    want = Synthetic(tuple(rates)).accepted(own_seed.tolist(), before, lens)
    result = torch.empty(rows, width + 4, dtype=torch.int32)
    tokens = torch.empty(rows, width + 1, dtype=torch.int64)
    verification.accept(
        targets,
        ids,
        column(lens),
        None,
        column(before),
        column(before) + 100,
        torch.ones(rows, dtype=torch.int64),
        tokens=tokens,
        counts=torch.empty(rows, dtype=torch.int64),
        path=torch.empty(rows, width + 1, dtype=torch.int64),
        history=None,
        result=result,
        rates=column(rates, torch.float32),
        seed=own_seed,
    )
    assert result[:, 1].tolist() == want
    for row, count in enumerate(want):
        expected = [*ids[row, 1 : count + 1].tolist(), int(targets[row, count])]
        assert tokens[row, : count + 1].tolist() == expected


# -- preparing --------------------------------------------------------------------------------------
@pytest.mark.parametrize("tree", [False, True])
@given(st.integers(0, 7), seeds)
@settings(max_examples=200, deadline=None)
def test_next_inputs_take_the_drafts_that_the_host_takes(tree, width, seed):
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    rows, tokens, block_size, columns = 3, width + 1, 4, rng.randint(2, 5)
    given_width = max(width, 1)
    depth = rng.randint(1, given_width) if tree else given_width
    drafts = torch.randint(0, VOCABULARY, (rows, given_width), generator=generator)
    parents = [random_parents(rng, given_width) for _ in range(rows)]
    if rng.random() < 0.4:
        drafts[rng.randrange(rows), rng.randrange(given_width)] = rng.choice([-1, VOCABULARY])
    if rng.random() < 0.4:
        node = rng.randrange(given_width)
        parents[rng.randrange(rows)][node] = rng.choice([-2, node, node + 3])
    lens = [rng.randint(-1, given_width + 1) for _ in range(rows)]
    budget = [rng.randint(0, given_width) for _ in range(rows)]
    committed = [rng.randint(1, 4 * columns - 1) for _ in range(rows)]
    limits = [own + rng.randint(0, tokens + 2) for own in committed]
    active = [rng.random() < 0.8 for _ in range(rows)]
    table = torch.randint(1, 50, (rows, columns), generator=generator)
    last = torch.randint(0, VOCABULARY, (rows,), generator=generator)
    out = {name: torch.full((rows, tokens), -7) for name in ("ids", "positions", "write_slots", "base")}
    out |= {"lens": torch.full((rows,), -7), "parents": torch.full((rows, width), -7)}
    out["faults"] = torch.zeros(1, dtype=torch.int64)
    extra = torch.full((rows, tokens, depth), -7) if tree else None
    verification.next_inputs(
        last,
        drafts,
        column(lens),
        column(parents) if tree else None,
        column(committed),
        column(limits),
        column(active),
        column(budget),
        table,
        block_size=block_size,
        vocab_size=VOCABULARY,
        depth=depth,
        extra=extra,
        **out,
    )
    faults = 0
    for row in range(rows):
        own, slots = committed[row], table[row].tolist() + [0] * tokens
        physical = [slots[slot // block_size] * block_size + slot % block_size for slot in range(own + width)]
        count = max(0, min(lens[row], budget[row], width)) if active[row] else 0
        above = parents[row][:count] if tree else chain(count)
        room = min(limits[row] - own - 1, depth)
        taken, bad = in_order(drafts[row, :count].tolist(), above, room, VOCABULARY, chain=not tree)
        faults += bad
        kept, rest = len(taken.ids), width - len(taken.ids)
        seen: list[list[int]] = []
        for node, parent in enumerate(taken.parents):
            seen.append([*(seen[parent] if parent >= 0 else []), own + node])
        levels = [len(path) for path in seen]
        assert out["lens"][row] == kept
        assert out["parents"][row].tolist() == taken.parents + [-1] * rest
        assert out["ids"][row].tolist() == [int(last[row]), *taken.ids, *[int(last[row])] * rest]
        places = [own - 1, *(own - 1 + level for level in levels), *[own - 1] * rest]
        assert out["positions"][row].tolist() == places
        root = physical[own - 1] if active[row] else 0
        assert out["write_slots"][row].tolist() == [root, *physical[own : own + kept], *[0] * rest]
        base = [own, *(own if tree else own + level for level in levels), *[own] * rest]
        assert out["base"][row].tolist() == base
        if extra is not None:
            padded = [[], *seen, *[[]] * rest]
            assert extra[row].tolist() == [path + [-1] * (depth - len(path)) for path in padded]
    assert int(out["faults"]) == faults
