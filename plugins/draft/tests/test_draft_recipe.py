"""What is trained is what drafts: the published model gives the logits that training gave it."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
import torch
from specdecode.contract import ConfigError
from specdecode.testing.reference import dense_forward
from specdecode.testing.tiny import loaded, tiny_checkpoint

pytest.importorskip("specdec_train")

from specdec_draft.recipe import DraftModelRecipe, DraftTrainingOptions
from specdec_train.publishing import write_checkpoint
from specdec_train.testing import frozen_target, packed

RECIPE = DraftModelRecipe()
TEXTS = [np.random.default_rng(seed).integers(3, 300, length).tolist() for seed, length in ((1, 9), (2, 14))]
KINDS = {
    "pruned": ("llama", DraftTrainingOptions(num_layers=1)),
    "tied": ("smollm", DraftTrainingOptions(num_layers=2, layers="1,0")),
    "narrow": ("llama", DraftTrainingOptions(num_layers=2, hidden_size=32, loss_vocab_size=40)),
    "of-another-family": ("qwen2", DraftTrainingOptions(num_layers=1, intermediate_size=48)),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    """Of each family the files, the loaded model, and what recipes are given of it."""
    made = {}

    def make(family):
        if family in made:
            return made[family]
        torch.set_num_threads(1)
        path = tiny_checkpoint(tmp_path_factory.mktemp(family), family, output_scale=0.5)
        model, info = loaded(path, max_model_len=128)
        made[family] = (path, model, frozen_target(path, info, torch.arange(info.vocab_size)))
        return made[family]

    return make


def batch_of(model, documents):
    """One row, the documents behind each other; the first two tokens of each are a prompt."""
    batch = packed(model, ["final"], *documents)
    return attrs.evolve(batch, answer=batch.positions >= 2)


def built(kind, targets):
    family, options = KINDS[kind]
    path, model, frozen = targets(family)
    torch.manual_seed(1)
    trainee = RECIPE.build(options, frozen)
    with torch.no_grad():
        for weight in trainee.parameters():
            weight += 0.02 * torch.randn_like(weight)
    return path, model, frozen, trainee


@every_kind
@torch.no_grad()
def test_the_published_model_gives_the_logits_of_training(kind, targets, tmp_path):
    path, model, _, trainee = built(kind, targets)
    published = write_checkpoint(trainee.checkpoint(), tmp_path / "draft", path, dtype=torch.float32)
    draft, _ = loaded(published, max_model_len=128)
    batch = batch_of(model, TEXTS)
    got = trainee.states(batch)[0] @ trainee.output().T
    wanted = torch.cat([draft.compute_logits(dense_forward(draft, text, [])[0]) for text in TEXTS])
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)
    assert got.std() > 0.01
    first = len(TEXTS[0])
    drafted = trainee.drafts(batch, 3)[0, first + 4]
    assert drafted.tolist() == wanted[first + 4 : first + 7].argmax(-1).tolist()
    assert (published / "tokenizer.json").read_bytes() == (path / "tokenizer.json").read_bytes()


@every_kind
def test_the_loss_has_the_gradient_of_its_own_formula(kind, targets):
    _, model, frozen, trainee = built(kind, targets)
    batch = batch_of(model, TEXTS)
    loss, terms = trainee.loss(batch)
    loss.backward()
    got = {name: weight.grad.clone() for name, weight in trainee.named_parameters()}
    trainee.zero_grad()
    size = trainee.options.loss_vocab_size
    kept = slice(None) if size is None else slice(300 - size, None)  # counts ascend
    losses = []
    for place in range(batch.ids.shape[1] - 1):
        if batch.documents[0, place] == batch.documents[0, place + 1] and batch.answer[0, place + 1]:
            law = (batch.features["final"][0, place] @ frozen.lm_head[kept].T).softmax(-1)
            states = trainee.states(batch)[0, place]
            losses.append(-(law * (states @ trainee.output()[kept].T).log_softmax(-1)).sum())
    expected = torch.stack(losses).mean()
    expected.backward()
    torch.testing.assert_close(loss, expected, atol=1e-4, rtol=1e-4)
    for name, weight in trainee.named_parameters():
        torch.testing.assert_close(got[name], weight.grad, atol=1e-4, rtol=1e-3, msg=name)
    assert 0 <= float(terms["agree_0"]) <= 1 and len(losses) == 19


@pytest.mark.parametrize("family", ["llama", "smollm"])
@torch.no_grad()
def test_with_all_layers_it_begins_as_the_target(family, targets):
    _, model, frozen = targets(family)
    trainee = RECIPE.build(DraftTrainingOptions(num_layers=2), frozen)
    batch = batch_of(model, TEXTS)
    torch.testing.assert_close(trainee.states(batch), batch.features["final"], atol=1e-4, rtol=1e-4)
    assert trainee.tied == (family == "smollm")


def test_layers_are_spread_over_the_target(targets):
    info = attrs.evolve(targets("llama")[2].info, num_layers=30)
    assert DraftTrainingOptions(num_layers=4).sources(info) == (0, 10, 19, 29)
    assert DraftTrainingOptions(num_layers=1).sources(info) == (0,)
    assert DraftTrainingOptions(num_layers=2, layers="3, 28").sources(info) == (3, 28)


def test_options_that_do_not_fit_are_refused(targets):
    info = targets("llama")[2].info
    with pytest.raises(ValueError, match="layers must be numbers"):
        DraftTrainingOptions(num_layers=2, layers="2,x")
    with pytest.raises(ValueError, match="must name num_layers=4"):
        DraftTrainingOptions(layers="2")
    with pytest.raises(ConfigError, match=r"layers 0 to 1, got \[2\]"):
        RECIPE.taps(DraftTrainingOptions(num_layers=2, layers="0,2"), info)
    with pytest.raises(ConfigError, match="multiple of the target's head_dim 16"):
        RECIPE.taps(DraftTrainingOptions(hidden_size=40), info)
    with pytest.raises(ConfigError, match="must divide the 4 attention heads"):
        RECIPE.taps(DraftTrainingOptions(num_kv_heads=3), info)
