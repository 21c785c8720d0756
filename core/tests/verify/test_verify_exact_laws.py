"""`standard` and `block` give the target's law exactly, worked out over all drafts and all chances."""

import functools

import attrs
import pytest
import torch
from specdecode.testing.rule_laws import (
    Drafted,
    chains,
    law_behind,
    mean_accepted,
    outcomes,
    plain_law,
    random_tables,
    rows_of,
    text_law,
    trees,
)
from specdecode.verify import Weighed, block, residual, standard

torch.set_num_threads(1)

CHAIN = (-1, 0)
SIBLINGS = (-1, -1, -1)
TREE = (-1, -1, 0, 1, 0)
#: Chances settle the deepest node first: that a block is accepted at all hides what its parts would do.
BLOCK = functools.partial(outcomes, block, backwards=True)
STANDARD = functools.partial(outcomes, standard)
CLOSE = 2e-6


def sparse(table, keep):
    """Only the ``keep`` likeliest of each law, as top_k leaves them."""
    kept = torch.where(table >= table.topk(keep, dim=-1).values[..., -1:], table, 0)
    return kept / kept.sum(-1, keepdim=True)


def distance(found, table, length):
    """Largest error of the probability of any text."""
    return float((text_law(found, table, length) - plain_law(table, length)).abs().max())


def point_masses(parents, ids):
    """Drafts that are no draws."""
    return [Drafted(1.0, ids, None)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("verify", [STANDARD, BLOCK], ids=["standard", "block"])
def test_a_chain(verify, seed):
    p, q = random_tables(seed, 4, 3)
    assert distance(verify(p, (-1, 0, 1), chains(q, 3)), p, 4) < CLOSE


@pytest.mark.parametrize("verify", [STANDARD, BLOCK], ids=["standard", "block"])
@pytest.mark.parametrize(("of_target", "of_drafter"), [(2, 4), (4, 2), (2, 2), (1, 3), (3, 1)])
def test_a_chain_whose_laws_leave_tokens_out(verify, of_target, of_drafter):
    p, q = random_tables(5, 3, 4)
    p, q = sparse(p, of_target), sparse(q, of_drafter)
    found = verify(p, CHAIN, chains(q, 2))
    assert distance(found, p, 3) < CLOSE
    assert not text_law(found, p, 3)[plain_law(p, 3) == 0].any(), "what the target never says was said"


@pytest.mark.parametrize("replacement", [False, True], ids=["without-replacement", "independent"])
@pytest.mark.parametrize(("parents", "size", "levels"), [(SIBLINGS, 4, 2), (TREE, 3, 3)])
@pytest.mark.parametrize("seed", range(2))
def test_a_tree(seed, parents, size, levels, replacement):
    p, q = random_tables(10 + seed, levels, size)
    drafted = trees(q, parents, replacement=replacement)
    assert distance(STANDARD(p, parents, drafted), p, levels) < CLOSE


def test_a_tree_whose_laws_leave_tokens_out():
    p, q = random_tables(3, 2, 4)
    p, q = sparse(p, 2), sparse(q, 3)
    found = STANDARD(p, (-1, -1), trees(q, (-1, -1)))
    assert distance(found, p, 2) < CLOSE
    assert not text_law(found, p, 2)[plain_law(p, 2) == 0].any()


@pytest.mark.parametrize("verify", [STANDARD, BLOCK], ids=["standard", "block"])
def test_drafts_without_probabilities_are_point_masses(verify):
    p, _ = random_tables(7, 3, 3)
    for ids in [(0, 0), (2, 1), (1, 2)]:
        found = verify(p, CHAIN, point_masses(CHAIN, ids))
        assert distance(found, p, 3) < CLOSE
        first, second = float(p[0, 0, ids[0]]), float(p[1, ids[0], ids[1]])
        assert mean_accepted(found) == pytest.approx(first + first * second, abs=CLOSE)


def test_a_tree_of_point_masses_is_accepted_as_often_as_the_target_says_a_sibling():
    p, _ = random_tables(7, 2, 4)
    found = STANDARD(p, (-1, -1), point_masses((-1, -1), (3, 1)))
    assert distance(found, p, 2) < CLOSE
    assert mean_accepted(found) == pytest.approx(float(p[0, 0, 3] + p[0, 0, 1]), abs=CLOSE)


def test_equal_siblings_count_once():
    """The second copy of a rejected draft is rejected for certain: its law has been taken out."""
    p = torch.tensor([0.2, 0.5, 0.3]).expand(2, 3, 3)
    found = STANDARD(p, (-1, -1), point_masses((-1, -1), (0, 0)))
    assert distance(found, p, 2) < CLOSE and mean_accepted(found) == pytest.approx(0.2, abs=CLOSE)


def test_acceptance_is_what_the_distance_of_the_laws_leaves():
    """One draft: 1 - d of them are accepted, d the total variation distance, under both rules."""
    p, q = random_tables(4, 2, 5)
    share = 1 - float((p[0, 0] - q[0, 0]).abs().sum()) / 2
    for verify in (STANDARD, BLOCK):
        assert mean_accepted(verify(p, (-1,), chains(q, 1))) == pytest.approx(share, abs=CLOSE)


@pytest.mark.parametrize("seed", range(6))
def test_block_never_accepts_fewer_than_standard(seed):
    p, q = random_tables(20 + seed, 4, 3)
    drafted = chains(q, 3)
    one_by_one = mean_accepted(STANDARD(p, (-1, 0, 1), drafted))
    together = mean_accepted(BLOCK(p, (-1, 0, 1), drafted))
    assert together > one_by_one + 0.01  # and in these cases more


def test_the_example_of_the_block_paper():
    """Two tokens, target (1/3, 2/3), drafter (2/3, 1/3), block of 2: 10/9 accepted one by one, 11/9 together.

    Section 1 of arXiv 2403.10444.
    """
    p = torch.tensor([1 / 3, 2 / 3]).expand(3, 2, 2)
    q = torch.tensor([2 / 3, 1 / 3]).expand(3, 2, 2)
    assert mean_accepted(STANDARD(p, CHAIN, chains(q, 2))) == pytest.approx(10 / 9, abs=CLOSE)
    assert mean_accepted(BLOCK(p, CHAIN, chains(q, 2))) == pytest.approx(11 / 9, abs=CLOSE)


@pytest.mark.parametrize("verify", [STANDARD, BLOCK], ids=["standard", "block"])
def test_equal_laws_accept_everything(verify):
    p, _ = random_tables(2, 4, 3)
    assert mean_accepted(verify(p, (-1, 0, 1), chains(p, 3))) == pytest.approx(3, abs=1e-4)


# -- greedy, and where there is nothing to draw ------------------------------------------------------
@pytest.mark.parametrize("rule", [standard, block])
@pytest.mark.parametrize("chance", [2.0**-33, 0.5, 1 - 2.0**-24])
def test_a_certain_target_gives_its_token_whatever_is_drafted(rule, chance):
    p = torch.zeros(3, 3, 3)
    p[:, :, 1] = 1
    _, q = random_tables(9, 2, 3)
    for case in chains(q, 2):
        result = rule(rows_of(p, CHAIN, [case], torch.full((1, 2), chance)))
        kept = result.accepted[0]
        assert all(case.ids[node] == 1 for node in kept)
        assert result.left[0].tolist() == [0, 1, 0]
        assert len(kept) == next((i for i, token in enumerate(case.ids) if token != 1), 2)


@pytest.mark.parametrize("rule", [standard, block])
@pytest.mark.parametrize("dead", [0, 1, 2])
def test_behind_a_prefix_without_a_law_nothing_is_drawn(rule, dead):
    """The drafts before it are accepted as ever, and the token behind them is told to be missing."""
    p, q = random_tables(1, 3, 3)
    p = p.clone()
    p[dead] = 0
    verify = BLOCK if rule is block else STANDARD
    found = verify(p, CHAIN, chains(q, 2))
    assert sum(outcome.weight for outcome in found) == pytest.approx(1, abs=1e-5)
    for outcome in found:
        assert (sum(outcome.left) == 0) == (len(outcome.ids) == dead)
        assert len(outcome.ids) <= dead
    if dead:  # as often as the target itself gets there
        law = text_law(found, p, dead)
        assert float((law - plain_law(p, dead)).abs().max()) < CLOSE


def test_what_is_left_when_rounding_leaves_nothing():
    p = torch.tensor([[0.25, 0.75]])
    assert torch.equal(residual(p, p), p)
    assert residual(p, torch.tensor([[0.5, 0.5]])).tolist() == [[0, 1]]


def test_block_refuses_a_tree():
    _, q = random_tables(0, 2, 3)
    with pytest.raises(ValueError, match="chain"):
        block(rows_of(q, (-1, -1), trees(q, (-1, -1))[:1], torch.ones(1, 2)))


def test_a_row_does_not_depend_on_its_neighbours():
    p, q = random_tables(6, 3, 5)
    cases = chains(q, 2)
    chances = torch.rand(len(cases), 2, generator=torch.Generator().manual_seed(0))
    for rule in (standard, block):
        together = rule(rows_of(p, CHAIN, cases, chances))
        for row, case in enumerate(cases):
            alone = rule(rows_of(p, CHAIN, [case], chances[row : row + 1]))
            assert alone.accepted == [together.accepted[row]]
            assert torch.equal(alone.left[0], together.left[row])


# -- H10, and forms that are wrong: the same sums show it --------------------------------------------
H10_TARGET = torch.tensor([0.3, 0.5, 0.2]).expand(2, 3, 3)
H10_DRAFTER = torch.tensor([[0.4, 0.35, 0.25]])


def test_h10_an_argmax_draft_is_a_point_mass():
    found = STANDARD(H10_TARGET, (-1,), [Drafted(1.0, (0,), None)])
    assert distance(found, H10_TARGET, 2) < CLOSE
    assert mean_accepted(found) == pytest.approx(0.3, abs=CLOSE)
    assert all(outcome.left[0] == 0 for outcome in found if not outcome.ids), "a rejected token came back"


def test_h10_dividing_by_the_softmax_of_an_argmax_draft_is_caught():
    found = STANDARD(H10_TARGET, (-1,), [Drafted(1.0, (0,), H10_DRAFTER)])
    law = text_law(found, H10_TARGET, 1)
    assert law.tolist() == pytest.approx([0.75, 0.25, 0], abs=CLOSE)
    assert distance(found, H10_TARGET, 1) > 0.4


def keeps_the_rejected(drafts):
    """Wrong: draws from the target's law after a rejection, the rejected draft's share and all."""
    result = standard(drafts)
    rows = range(len(drafts.ids))
    return Weighed(
        result.accepted, drafts.law(rows, [nodes[-1] if nodes else -1 for nodes in result.accepted])
    )


def forgets_the_elders(drafts):
    """Wrong: every sibling is tried against the whole law of the target."""
    every = range(len(drafts.ids))
    law = drafts.law(every, [-1 for _ in every])
    accepted, left = [() for _ in every], law.clone()
    for node in range(len(drafts.ids[0])):
        tokens, q = (
            drafts.tokens(every, [node] * len(law)),
            drafts.drawn_from(every, [node] * len(law), law.shape[-1]),
        )
        ratio = (law.gather(-1, tokens) / q.gather(-1, tokens))[:, 0]
        for row in every:
            if not accepted[row] and bool(drafts.chances[row, node] < ratio[row]):
                accepted[row] = (node,)
        left = residual(left, q)
    won = [row for row in every if accepted[row]]
    if won:
        left[won] = drafts.law(won, [accepted[row][0] for row in won])
    return Weighed(accepted, left)


@pytest.mark.parametrize(("wrong", "parents"), [(keeps_the_rejected, CHAIN), (forgets_the_elders, (-1, -1))])
def test_a_wrong_rule_fails_the_same_sum(wrong, parents):
    p, q = random_tables(8, 3, 3)
    found = outcomes(wrong, p, parents, trees(q, parents))
    assert distance(found, p, 2) > 0.01


def test_one_law_for_siblings_without_replacement_is_caught():
    """Siblings drawn without replacement, and told as if with."""
    p, q = torch.tensor([0.4, 0.4, 0.2]).expand(2, 3, 3), torch.tensor([0.1, 0.3, 0.6]).expand(2, 3, 3)
    honest = trees(q, (-1, -1))
    lying = [attrs.evolve(case, probs=law_behind(q, ()).expand(2, -1)) for case in honest]
    assert distance(STANDARD(p, (-1, -1), honest), p, 1) < CLOSE
    assert distance(STANDARD(p, (-1, -1), lying), p, 1) > 0.1
