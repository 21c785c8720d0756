"""Accepting and preparing in Triton against the torch references, over random rows; all are integers."""

import random

import pytest
import torch

pytest.importorskip("triton")

from specdec_kernels import verification
from specdec_kernels.verification import gpu, reference

ON_A_CARD = torch.cuda.is_available()
DEVICE = "cuda" if ON_A_CARD else "cpu"
VOCABULARY = 3
#: Rounds of random rows for each shape; what a round takes under the interpreter is what an operation takes.
ROUNDS = 100 if ON_A_CARD else 8

card_only = pytest.mark.skipif(not ON_A_CARD, reason="needs a CUDA device")


def column(values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype)


def random_parents(rng, rows, width):
    parents = [[rng.randint(-1, node - 1) for node in range(width)] for _ in range(rows)]
    return column(parents).reshape(rows, width)


def accepting(rng, rows, tokens, tree, synthetic):
    """Arguments of ``accept``: what is read, and what is read and written."""
    width = tokens - 1
    committed = column([rng.randint(1, 9) for _ in range(rows)])
    least = -1 if rng.random() < 0.3 else 0
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    read = {
        "targets": torch.randint(least, VOCABULARY, (rows, tokens), generator=generator),
        "ids": torch.randint(0, VOCABULARY, (rows, tokens), generator=generator),
        "lens": column([rng.randint(0, width) for _ in range(rows)]),
        "parents": random_parents(rng, rows, width) if tree else None,
        "limit": committed + column([rng.randint(1, tokens + 2) for _ in range(rows)]),
        "rates": torch.rand(width, generator=generator) if synthetic else None,
        "seed": torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator) if synthetic else None,
    }
    written = {
        "committed": committed,
        "active": column([int(rng.random() < 0.8) for _ in range(rows)]),
        "tokens": torch.full((rows, tokens), -7),
        "counts": column([-7] * rows),
        "path": torch.full((rows, tokens), -7),
        "history": torch.randint(0, VOCABULARY, (rows, 30), generator=generator).int(),
        "result": torch.full((rows, tokens + 3), -7, dtype=torch.int32),
    }
    return read, written


def preparing(rng, rows, tokens, tree):
    """Arguments of ``next_inputs`` likewise, and those that are no tensors; some drafts are faulty."""
    width, columns = tokens - 1, rng.randint(2, 5)
    given = max(width, 1) + rng.randint(0, 1)
    depth = rng.randint(1, max(width, 1)) if tree else max(width, 1)
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    ids = torch.randint(0, VOCABULARY, (rows, given), generator=generator)
    parents = random_parents(rng, rows, given)
    for row in range(rows):
        if rng.random() < 0.3:
            ids[row, rng.randrange(given)] = rng.choice([-1, VOCABULARY])
        if rng.random() < 0.2:
            node = rng.randrange(given)
            parents[row, node] = rng.choice([-2, node, node + 1])
    committed = column([rng.randint(1, 4 * columns - 1) for _ in range(rows)])
    read = {
        "last": torch.randint(0, VOCABULARY, (rows,), generator=generator),
        "draft_ids": ids,
        "draft_lens": column([rng.randint(-1, given + 1) for _ in range(rows)]),
        "draft_parents": parents if tree else None,
        "committed": committed,
        "limit": committed + column([rng.randint(0, tokens + 2) for _ in range(rows)]),
        "active": column([int(rng.random() < 0.8) for _ in range(rows)]),
        "budget": column([rng.randint(0, given) for _ in range(rows)]),
        "block_table": torch.randint(1, 50, (rows, columns), generator=generator),
    }
    written = {name: torch.full((rows, tokens), -7) for name in ("ids", "positions", "write_slots", "base")}
    written |= {"lens": column([-7] * rows), "parents": torch.full((rows, width), -7), "faults": column([3])}
    if tree:
        written["extra"] = torch.full((rows, tokens, depth), -7)
    return read, written, {"block_size": 4, "vocab_size": VOCABULARY, "depth": depth}


def moved(values, device=DEVICE):
    return {name: own if own is None else own.clone().to(device) for name, own in values.items()}


def assert_same(got, want):
    for name, value in want.items():
        assert torch.equal(got[name].cpu(), value.cpu()), name


@pytest.mark.parametrize(
    ("tokens", "kind"), [(1, "chain"), (6, "chain"), (8, "tree"), (13, "tree"), (4, "synthetic")]
)
def test_accept(tokens, kind):
    rng = random.Random(tokens)
    for _ in range(ROUNDS):
        read, written = accepting(rng, 3, tokens, kind == "tree", kind == "synthetic")
        want, got = moved(written, "cpu"), moved(written)
        reference.accept(**read, **want)
        gpu.accept(**moved(read), **got)
        assert_same(got, want)


def test_accept_without_history():
    read, written = accepting(random.Random(0), 3, 4, False, False)
    del written["history"]
    want, got = moved(written, "cpu"), moved(written)
    reference.accept(**read, **want, history=None)
    gpu.accept(**moved(read), **got, history=None)
    assert_same(got, want)


@pytest.mark.parametrize(("tokens", "tree"), [(1, False), (2, False), (6, False), (1, True), (7, True)])
def test_next_inputs(tokens, tree):
    rng = random.Random(tokens)
    for _ in range(ROUNDS):
        read, written, sizes = preparing(rng, 3, tokens, tree)
        want, got = moved(written, "cpu"), moved(written)
        reference.next_inputs(**read, **want, **sizes)
        gpu.next_inputs(**moved(read), **got, **sizes)
        assert_same(got, want)


def test_what_comes_behind_a_draft_too_deep_closes_ranks():
    width, sizes = 6, {"block_size": 4, "vocab_size": 99, "depth": 3}
    read = {
        "last": column([50]),
        "draft_ids": column([[10, 11, 12, 13, 14, 15]]),
        "draft_lens": column([width]),
        "draft_parents": column([[-1, 0, 1, -1, 3, 4]]),
        "committed": column([8]),
        "limit": column([11]),  # room for two drafts and the target's token
        "active": column([1]),
        "budget": column([width]),
        "block_table": column([[5, 6, 7, 8]]),
    }
    grid = (1, width + 1)
    got = {name: torch.full(grid, -7) for name in ("ids", "positions", "write_slots", "base")}
    got |= {"lens": column([-7]), "parents": torch.full((1, width), -7), "faults": column([0])}
    got = moved(got | {"extra": torch.full((*grid, 3), -7)})
    gpu.next_inputs(**moved(read), **got, **sizes)
    assert got["lens"].tolist() == [4] and got["faults"].tolist() == [0]
    assert got["ids"].tolist() == [[50, 10, 11, 13, 14, 50, 50]]
    assert got["parents"].tolist() == [[-1, 0, -1, 2, -1, -1]]
    assert got["positions"].tolist() == [[7, 8, 9, 8, 9, 7, 7]]
    assert got["write_slots"].tolist() == [[27, 28, 29, 30, 31, 0, 0]]
    seen = [[], [8], [8, 9], [10], [10, 11], [], []]
    assert got["extra"].tolist() == [[path + [-1] * (3 - len(path)) for path in seen]]


def test_drafts_may_be_columns_of_a_wider_buffer():
    read, written, sizes = preparing(random.Random(5), 3, 7, True)
    want, got = moved(written, "cpu"), moved(written)
    reference.next_inputs(**read, **want, **sizes)
    wider = moved(read)
    for name in ("draft_ids", "draft_parents", "block_table"):
        own = wider[name]
        wider[name] = torch.full((3, own.shape[1] + 5), 99, device=DEVICE)[:, : own.shape[1]].copy_(own)
    gpu.next_inputs(**wider, **got, **sizes)
    assert_same(got, want)


@pytest.mark.parametrize(("tokens", "tree"), [(1, False), (4, False), (7, True)])
def test_what_a_proposer_is_fed(tokens, tree):
    rng = random.Random(tokens)
    for _ in range(ROUNDS):
        counts = column([rng.randint(0, tokens) for _ in range(3)])
        committed = counts + column([rng.randint(1, 9) for _ in range(3)])
        read = {
            "committed": committed,
            "counts": counts,
            "path": torch.randint(0, tokens, (3, tokens), generator=torch.Generator().manual_seed(tokens)),
            "limit": committed + column([rng.randint(0, tokens + 2) for _ in range(3)]),
            "active": column([rng.randint(0, 1) for _ in range(3)]),
            "budget": column([rng.randint(0, tokens) for _ in range(3)]),
        }
        sizes = {"width": max(1, tokens - 1), "depth": max(1, tokens - 2), "tree": tree}
        assert_same(gpu.fed_inputs(**moved(read), **sizes), reference.fed_inputs(**read, **sizes))
    # Behind 5 committed tokens, 2 of them new: those two, and the second again.
    got = gpu.fed_inputs(
        *(column(own).to(DEVICE) for own in ([5], [2], [[0, 1, 1, 1]], [7], [1], [3])),
        width=3,
        depth=3,
        tree=False,
    )
    assert {name: own.tolist() for name, own in got.items()} == {
        "committed": [5], "last": [1], "room": [1], "budget": [1],
        "positions": [3, 4, 4, 4], "hidden": [0, 1, 1, 1],
    }  # fmt: skip


@pytest.mark.parametrize("entries", [0, 1, 3])
def test_where_drafts_are_written(entries):
    generator = torch.Generator().manual_seed(entries)
    tokens = 150  # more than a program's
    rows = torch.arange(3).repeat_interleave(tokens // 3)
    read = {
        "rows": rows,
        "slots": torch.randint(0, 24, (tokens, 2), generator=generator)[:, 1],  # some beyond the table
        "base": torch.randint(1, 20, (tokens,), generator=generator),
        "extra": torch.randint(-1, 5, (tokens, entries), generator=generator) if entries else None,
        "counts": column([2, 0, 1]),
        "block_table": torch.randint(1, 50, (3, 5), generator=generator),
    }
    want, got = reference.draft_places(**read, block_size=4), gpu.draft_places(**moved(read), block_size=4)
    for ours, theirs in zip(got, want, strict=True):
        assert torch.equal(ours.cpu(), theirs)
    assert not want[0][rows == 1].any()
    here = (rows != 1) & (read["slots"] < 20)
    block = read["block_table"][rows, read["slots"].clamp(max=19) // 4]
    assert torch.equal(want[0][here], (block * 4 + read["slots"] % 4)[here])


def test_accepted_nodes_move_to_their_levels():
    rng = random.Random(3)
    for tokens in (2, 5, 17):
        rows = 4
        counts = column([rng.randint(0, tokens) for _ in range(rows - 1)] + [tokens])
        path = torch.zeros(rows, tokens, dtype=torch.int64)
        for row, count in enumerate(counts.tolist()):
            nodes = sorted(rng.sample(range(1, tokens), max(0, min(count, tokens) - 1)))
            path[row, 1 : 1 + len(nodes)] = column(nodes)
        path[0] = torch.arange(tokens)  # a chain stays where it is
        read = {
            "committed": counts + column([rng.randint(0, 9) for _ in range(rows)]),
            "counts": counts,
            "path": path,
            "block_table": torch.randperm(40)[: rows * 8].reshape(rows, 8) + 1,
        }
        got = gpu.accepted_moves(**moved(read), block_size=4)
        want = reference.accepted_moves(**read, block_size=4)
        for ours, theirs in zip(got, want, strict=True):
            assert torch.equal(ours.cpu(), theirs)
        expected = []
        for row in range(rows):
            before, count = int(read["committed"][row] - counts[row]), int(counts[row])
            for level in range(1, tokens):
                slots = before + int(path[row, level]) - 1, before + level - 1
                stays = level >= count or slots[0] == slots[1]
                block = read["block_table"][row]
                expected.append([0, 0] if stays else [int(block[s // 4]) * 4 + s % 4 for s in slots])
        assert torch.stack(want, 1).tolist() == expected
        assert not want[0][: tokens - 1].any()


@card_only
@pytest.mark.parametrize("kind", ["chain", "tree", "synthetic"])
def test_many_rows_in_a_graph(kind):
    rng = random.Random(1)
    read, written = (moved(own) for own in accepting(rng, 300, 9, kind == "tree", kind == "synthetic"))
    warm = moved(written)
    verification.accept(**read, **warm)
    torch.cuda.synchronize()
    graph, got = torch.cuda.CUDAGraph(), moved(written)
    with torch.cuda.graph(graph):
        verification.accept(**read, **got)
    for _ in range(3):
        want = moved(got, "cpu")
        reference.accept(**moved(read, "cpu"), **want)
        graph.replay()
        assert_same(got, want)
