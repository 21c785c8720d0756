"""Growing trees in Triton against their reference."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from specdec_kernels.trees import Candidates, Tree, gpu, reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def scores_of(generator, batch, nodes, fanout, *, coarse=False, noisy=False):
    """Of siblings, the best first: log-probabilities, or such with noise, that stand for more than all."""
    logits = torch.randn(batch, nodes, fanout + 3, generator=generator) * 3
    if coarse:
        logits = logits.round()
    scores = logits if noisy else logits.log_softmax(-1)
    return scores.sort(-1, descending=True).values[..., :fanout].contiguous().to(DEVICE)


def grown(chosen, fanout, depth, width, room, *, first=None, **how):
    """Candidates, levels and tree by ``chosen``, the children's ids and scores being random."""
    generator, batch = torch.Generator().manual_seed(fanout + depth), len(room)
    candidates = Candidates.empty(batch, fanout, depth, torch.device(DEVICE), first)
    levels = []
    for number in range(depth):
        nodes = fanout if number else 1
        ids = torch.randint(1 << 40, (batch, nodes, fanout), generator=generator).to(DEVICE)
        scores = scores_of(generator, batch, nodes, fanout, **how)
        if how.get("noisy") and number == 1:
            scores[0, 0, -1], scores[1 % batch, 0] = -torch.inf, -torch.inf
        levels.append(chosen.extend(candidates, levels[-1] if levels else None, ids, scores))
    return candidates, levels, chosen.keep(candidates, torch.tensor(room, device=DEVICE), width)


@pytest.mark.parametrize("how", [{}, {"coarse": True}, {"noisy": True}], ids=["exact", "ties", "noise"])
@pytest.mark.parametrize(
    ("fanout", "depth", "width"), [(1, 1, 1), (1, 4, 3), (4, 5, 16), (3, 4, 30), (10, 7, 60), (16, 3, 500)]
)
def test_trees_are_the_references(fanout, depth, width, how):
    room = [depth, 1, 0, 2]
    candidates, levels, tree = grown(gpu, fanout, depth, width, room, **how)
    wanted, steps, expected = grown(reference, fanout, depth, width, room, **how)
    # Sums of one order and exponentials of another: what is a tie here is one there if there are no others.
    torch.testing.assert_close(candidates.scores, wanted.scores, atol=1e-5, rtol=1e-5)
    if how.get("coarse") or how.get("noisy"):
        return check_closed(tree, candidates, room)
    for level, step in zip(levels, steps, strict=True):
        for name in ("ids", "nodes", "rows", "paths"):
            assert torch.equal(getattr(level, name), getattr(step, name)), name
    assert torch.equal(candidates.ids, wanted.ids) and torch.equal(candidates.parents, wanted.parents)
    assert tree.lens.tolist() == expected.lens.tolist()
    for row, count in enumerate(tree.lens.tolist()):
        assert tree.ids[row, :count].tolist() == expected.ids[row, :count].tolist()
        assert tree.parents[row, :count].tolist() == expected.parents[row, :count].tolist()


@pytest.mark.parametrize(("fanout", "depth"), [(1, 3), (4, 5)])
def test_entries_are_counted_from_the_first(fanout, depth):
    room, first = [depth, depth, 1], torch.tensor([7, 0, 1 << 33], device=DEVICE)
    for chosen in (gpu, reference):
        _, levels, _ = grown(chosen, fanout, depth, fanout, room, first=first)
        _, steps, _ = grown(chosen, fanout, depth, fanout, room)
        for level, step in zip(levels, steps, strict=True):
            assert torch.equal(level.paths, first[:, None, None] + step.paths)


def test_trees_are_written_where_they_are_wanted():
    """Into the first columns of rows that are longer, and no more nodes than each row may have."""
    room, budget, width = torch.tensor([4, 1, 4, 2], device=DEVICE), [9, 2, 0, 1], 6
    for chosen in (gpu, reference):
        candidates, _, tree = grown(chosen, 3, 4, width, room.tolist())
        ids, parents = (torch.full((4, columns), -5, device=DEVICE) for columns in (8, 7))
        out = Tree(ids[:, :width], parents[:, :width], torch.full((4,), -5, device=DEVICE))
        given = torch.tensor(budget, device=DEVICE)
        assert chosen.keep(candidates, room, width, given, out) is out
        assert torch.equal(out.ids, tree.ids) and torch.equal(out.parents, tree.parents)
        assert out.lens.tolist() == [min(pair) for pair in zip(tree.lens.tolist(), budget, strict=True)]
        assert (ids[:, width:] == -5).all() and (parents[:, width:] == -5).all()
        lens = chosen.keep(candidates, room, width, given).lens
        assert torch.equal(lens, out.lens)


def check_closed(tree, candidates, room):
    """The reference's choice of the scores as they are: ties go to the older there, too."""
    expected = reference.keep(candidates, torch.tensor(room, device=DEVICE), tree.ids.shape[1])
    assert torch.equal(tree.lens, expected.lens)
    assert torch.equal(tree.ids, expected.ids) and torch.equal(tree.parents, expected.parents)
    for row, count in enumerate(tree.lens.tolist()):
        for node, parent in enumerate(tree.parents[row, :count].tolist()):
            assert -1 <= parent < node


def test_what_cannot_be_drawn_comes_last_and_nan_is_that():
    ids = torch.arange(12, device=DEVICE).view(2, 2, 3)
    scores = torch.full((2, 2, 3), -2.0, device=DEVICE)
    scores[0, 0], scores[0, 1, 2], scores[1, 0, 0] = -torch.inf, -torch.inf, torch.nan
    for chosen in (gpu, reference):
        candidates = Candidates.empty(2, 3, 2, torch.device(DEVICE))
        root = chosen.extend(candidates, None, ids[:, :1].contiguous(), scores[:, 1:].contiguous())
        assert root.ids[0].tolist() == [0, 1, 2] and root.total[0, 2] == -torch.inf
        assert root.nodes.tolist() == [[0, 1, 2]] * 2 and root.rows.tolist() == [0, 0, 0, 1, 1, 1]
        nan = chosen.extend(
            Candidates.empty(2, 3, 1, torch.device(DEVICE)),
            None,
            ids[:, :1].contiguous(),
            scores[:, :1].contiguous(),
        )
        assert (nan.total == -torch.inf).all() and nan.ids.tolist() == [[0, 1, 2], [6, 7, 8]]


def test_equal_scores_go_on_by_age():
    ids = torch.arange(9, device=DEVICE).view(1, 3, 3)
    scores = torch.full((1, 3, 3), -1.5, device=DEVICE)
    for chosen in (gpu, reference):
        candidates = Candidates.empty(1, 3, 2, torch.device(DEVICE))
        first = chosen.extend(candidates, None, ids[:, :1].contiguous(), scores[:, :1].contiguous())
        second = chosen.extend(candidates, first, ids, scores)
        assert second.ids.tolist() == [[0, 1, 2]] and second.nodes.tolist() == [[3, 4, 5]]
        assert second.rows.tolist() == [0, 0, 0] and second.paths.tolist() == [[[0, 3], [0, 4], [0, 5]]]
        tree = chosen.keep(candidates, torch.tensor([2], device=DEVICE), 5)
        assert tree.parents.tolist() == [[-1, -1, -1, 0, 0]] and tree.lens.tolist() == [5]


def test_more_than_a_program_holds_is_left_to_torch():
    assert not gpu.can_extend(torch.zeros(1, 33, 33))
    assert gpu.can_extend(torch.zeros(1, 32, 32))
    assert not gpu.can_keep(Candidates.empty(1, 40, 4, torch.device(DEVICE)))
