"""What is trained is what drafts: the published heads give the logits that training gave them."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
import torch
from specdec_medusa.choices import expected_tokens, search_tree
from specdecode import SamplingParams
from specdecode.plugins import default_manager, prepare
from specdecode.testing.reference import DenseStep, StatelessDrafter

pytest.importorskip("specdec_train")

from specdec_medusa.recipe import MedusaRecipe, MedusaTrainingOptions
from specdec_train.publishing import write_checkpoint
from specdec_train.testing import frozen_target, packed

TEXT = np.random.default_rng(5).integers(3, 300, 12).tolist()
OPTIONS = MedusaTrainingOptions(num_heads=3, num_layers=2)


@pytest.fixture(scope="session")
def frozen(target, info):
    return frozen_target(target, info)


def built(frozen, options=OPTIONS):
    """A trainee none of whose weights is what it began as."""
    torch.manual_seed(1)
    trainee = MedusaRecipe().build(options, frozen)
    with torch.no_grad():
        for weight in trainee.parameters():
            weight += 0.1 * torch.randn_like(weight)
    return trainee.eval()


@torch.no_grad()
def test_the_published_heads_draft_what_training_drafts(frozen, model, info, tmp_path):
    trainee = built(frozen)
    path = write_checkpoint(trainee.checkpoint(), tmp_path, tmp_path, dtype=torch.float32)
    config = MedusaRecipe().speculative_config(OPTIONS, path)
    drafter = StatelessDrafter(model, info, config)
    step = DenseStep(
        history=TEXT, prompt_len=len(TEXT), params=SamplingParams(temperature=0), budget=3, room=3
    )
    ids = list(drafter.drafts(step)[0])
    batch = packed(model, ["final"], [7, 8, 9, 10, 11], [*TEXT, *ids])
    assert trainee.drafts(batch, 5)[0, 5 + len(TEXT) - 1].tolist() == ids and len(ids) == 3


@pytest.mark.parametrize("loss_vocab_size", [None, 60])
def test_the_loss_has_the_gradient_of_its_own_formula(loss_vocab_size, frozen, model):
    trainee = built(frozen, attrs.evolve(OPTIONS, loss_vocab_size=loss_vocab_size))
    batch = packed(model, ["final"], [5, 6, 7, 8, 9, 10], TEXT)
    batch = attrs.evolve(batch, answer=batch.positions >= 2)
    loss, _ = trainee.loss(batch)
    loss.backward()
    got = {name: weight.grad.clone() for name, weight in trainee.named_parameters()}
    trainee.zero_grad()
    kept = torch.arange(300) if loss_vocab_size is None else trainee.vocabulary
    total, weights = 0.0, 0.0
    for head in range(3):
        losses = []
        for place in range(1, batch.ids.shape[1] - head - 1):
            then = place + head + 1
            same = batch.documents[0, place - 1] == batch.documents[0, then]
            if not same or not batch.answer[0, then] or batch.ids[0, then] not in kept:
                continue
            z = batch.features["final"][0, place - 1]
            for layer in range(2):
                y = z @ trainee.weights[layer][head].T + trainee.biases[layer][head]
                z = z + y * torch.sigmoid(y)
            law = (batch.features["final"][0, then - 1] @ frozen.lm_head[kept].T).softmax(-1)
            losses.append(-(law * (z @ frozen.lm_head[kept].T).log_softmax(-1)).sum())
        total = total + OPTIONS.decay**head * torch.stack(losses).mean()
        weights += OPTIONS.decay**head
    (total / weights).backward()
    torch.testing.assert_close(loss, total / weights, atol=1e-4, rtol=1e-4)
    for name, weight in trainee.named_parameters():
        torch.testing.assert_close(got[name], weight.grad, atol=1e-4, rtol=1e-3, msg=name)


@torch.no_grad()
def test_the_searched_tree_goes_by_what_was_right(frozen, model, info, tmp_path):
    trainee = built(frozen, attrs.evolve(OPTIONS, search_tree=6))
    batch = packed(model, ["final"], TEXT * 3)
    trainee.drafts(batch, 5)
    accuracies = trainee.accuracies()
    head = frozen.lm_head
    for number in range(3):  # counted by hand
        hits = torch.zeros(10)
        places = range(1, batch.ids.shape[1] - number - 1)
        for place in places:
            best = (trainee.states(batch.features["final"][0, place - 1], number) @ head.T).topk(10).indices
            hits += best == batch.ids[0, place + number + 1]
        torch.testing.assert_close(torch.tensor(accuracies[number]), hits / len(places))
    path = write_checkpoint(trainee.checkpoint(), tmp_path, tmp_path, dtype=torch.float32)
    needs = prepare(default_manager(), {"model": str(path)}, info).needs
    assert needs.width == len(search_tree(accuracies, 6) or [(0,)])
    trainee.loss(batch)
    assert trainee.accuracies() == [[0.0] * 10] * 3  # of weights that are no more


def test_expected_tokens_of_a_searched_tree_are_the_best_there_are():
    """Against all trees of so many nodes."""
    accuracies = [[0.5, 0.2, 0.15], [0.3, 0.3, 0.05], [0.4, 0.0]]
    paths = [(a,) for a in range(3)] + [(a, b) for a in range(3) for b in range(3)]
    paths += [(a, b, c) for a in range(3) for b in range(3) for c in range(2)]

    def grown(trees):
        found = set()
        for tree in trees:
            for path in paths:
                if path not in tree and (len(path) == 1 or path[:-1] in tree):
                    found.add(tree | {path})
        return found

    trees = {frozenset()}
    for nodes in range(1, 6):
        trees = grown(trees)
        best = max(expected_tokens(accuracies, sorted(tree)) for tree in trees)
        chosen = search_tree(accuracies, nodes)
        assert len(chosen) == nodes and expected_tokens(accuracies, chosen) == pytest.approx(best)
        assert all(len(path) == 1 or path[:-1] in chosen[:place] for place, path in enumerate(chosen))
    assert search_tree(accuracies, 3) == search_tree(accuracies, 5)[:3]
    assert len(search_tree([[0.5, 0.0]], 9)) == 1
    with pytest.raises(ValueError, match="nodes must be at least 1"):
        search_tree(accuracies, 0)
    with pytest.raises(ValueError, match="accuracies of head 1"):
        search_tree([[0.5], [0.9, 0.2]], 3)


def test_published_choices_hold_each_parent_before_its_child():
    from specdec_medusa.choices import PUBLISHED

    for choices in PUBLISHED.values():
        assert len(set(choices)) == len(choices) == 63
        assert all(len(p) == 1 or p[:-1] in choices[:place] for place, p in enumerate(choices))
