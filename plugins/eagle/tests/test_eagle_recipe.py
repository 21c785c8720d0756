"""What is trained is what drafts: the published head gives the logits that training gave it."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
import torch
from specdecode import SamplingParams
from specdecode.contract import ConfigError
from specdecode.testing.reference import DenseStep, StatelessDrafter

pytest.importorskip("specdec_train")

from specdec_eagle.recipe import Eagle3Recipe, Eagle3TrainingOptions, EagleRecipe, EagleTrainingOptions
from specdec_train.publishing import write_checkpoint
from specdec_train.testing import frozen_target, packed

TEXT = np.random.default_rng(5).integers(3, 300, 12).tolist()
DRAFTS = 4
KINDS = {
    "eagle": (EagleRecipe(), EagleTrainingOptions(intermediate_size=96)),
    "eagle-part-of-the-law": (EagleRecipe(), EagleTrainingOptions(loss_vocab_size=40)),
    "eagle3": (Eagle3Recipe(), Eagle3TrainingOptions()),
    "eagle3-reduced": (
        Eagle3Recipe(),
        Eagle3TrainingOptions(draft_vocab_size=120, fc_norm=True, aux_layer_ids="3,6", num_heads=2),
    ),
    "eagle3-with-the-targets-rows": (
        Eagle3Recipe(),
        Eagle3TrainingOptions(draft_vocab_size=120, own_head=False),
    ),
    "eagle3-normed-residual": (Eagle3Recipe(), Eagle3TrainingOptions(norm_before_residual=True)),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="session")
def frozen(target, info):
    return frozen_target(target, info)


def built(kind, frozen):
    """A trainee none of whose weights is what it began as."""
    recipe, options = KINDS[kind]
    torch.manual_seed(1)
    trainee = recipe.build(options, frozen)
    with torch.no_grad():
        for weight in trainee.parameters():
            weight += 0.05 * weight.std().nan_to_num(1.0).clamp(min=0.5) * torch.randn_like(weight)
    return recipe, options, trainee.eval()


def of_the_plugin(path, model, info, method):
    """The plugin's logits ``[DRAFTS, V]`` of a greedy chain behind TEXT, and its drafts."""
    config = {"method": method, "model": str(path), "num_speculative_tokens": DRAFTS}
    drafter = StatelessDrafter(model, info, config)
    head, seen = drafter._proposer._head, []
    original = head.logits

    def watched(states):
        logits = original(states)
        seen.append(logits)
        return logits

    head.logits = watched
    params = SamplingParams(temperature=0, max_tokens=20)
    step = DenseStep(history=TEXT, prompt_len=len(TEXT), params=params, budget=DRAFTS, room=DRAFTS)
    ids = list(drafter.drafts(step)[0])  # fills what was seen
    assert len(ids) == DRAFTS
    return torch.cat(seen), ids


@every_kind
@torch.no_grad()
def test_the_published_head_gives_the_logits_of_training(kind, frozen, model, info, tmp_path):
    recipe, options, trainee = built(kind, frozen)
    path = write_checkpoint(trainee.checkpoint(), tmp_path, tmp_path, dtype=torch.float32)
    wanted, ids = of_the_plugin(path, model, info, recipe.name)
    # The text goes on as the plugin drafted, and stands behind another document, whose end it must not see.
    boundaries = recipe.taps(options, info)
    batch = packed(model, boundaries, [7, 8, 9, 10, 11], [*TEXT, *ids])
    place = 5 + len(TEXT) - 1
    kept = trainee.vocabulary if kind.startswith("eagle3") else None
    head = trainee.output() if kind.startswith("eagle3") else frozen.lm_head
    got = torch.stack([states[0, place] @ head.T for _, states in trainee.passes(batch, DRAFTS)])
    if kept is not None and wanted.shape[1] != len(kept):
        wanted = wanted[:, kept]
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)
    assert trainee.drafts(batch, DRAFTS)[0, place].tolist() == ids
    assert got.std() > 0.01 and len({tuple(row.tolist()) for row in got}) == DRAFTS


@every_kind
def test_the_loss_has_the_gradient_of_its_own_formula(kind, frozen, model, info):
    """Against a soft cross entropy written out, through autograd alone."""
    recipe, options, trainee = built(kind, frozen)
    batch = packed(model, recipe.taps(options, info), [5, 6, 7, 8, 9, 10], TEXT)
    batch = attrs.evolve(batch, answer=batch.positions >= 2)
    loss, terms = trainee.loss(batch)
    loss.backward()
    got = {name: weight.grad.clone() for name, weight in trainee.named_parameters()}
    trainee.zero_grad()
    expected = written_out(trainee, batch, frozen)
    expected.backward()
    torch.testing.assert_close(loss, expected, atol=1e-4, rtol=1e-4)
    for name, weight in trainee.named_parameters():
        torch.testing.assert_close(got[name], weight.grad, atol=1e-4, rtol=1e-3, msg=name)
    assert all(0 <= float(share) <= 1 for share in terms.values()) and len(terms) == options.unrolled


def written_out(trainee, batch, frozen):
    options, kept = trainee.options, trainee.vocabulary
    kept = torch.arange(300) if kept is None else kept
    total, weights = 0.0, 0.0
    for number, (feature, states) in enumerate(trainee.passes(batch, options.unrolled)):
        losses, distances = [], []
        for place in range(batch.ids.shape[1] - number - 1):
            document, position = batch.documents[0, place], batch.positions[0, place]
            then = place + number + 1
            if position == 0 or batch.documents[0, then] != document or not batch.answer[0, then]:
                continue
            final = batch.features["final"][0, then - 1]
            distance = torch.nn.functional.smooth_l1_loss(feature[0, place], final)
            distances.append(distance * getattr(options, "feature_weight", 0.0))
            if batch.ids[0, then] in kept:
                law = (final @ frozen.lm_head[kept].T).softmax(-1)
                losses.append(-(law * (states[0, place] @ trainee.output().T).log_softmax(-1)).sum())
        weight = options.decay**number
        total = total + weight * (torch.stack(losses).mean() + torch.stack(distances).mean())
        weights += weight
    return total / weights


def test_options_that_do_not_fit_are_refused(info):
    with pytest.raises(ValueError, match="aux_layer_ids must be numbers"):
        Eagle3TrainingOptions(aux_layer_ids="2,x")
    with pytest.raises(ConfigError, match="must not begin with 1"):
        Eagle3Recipe().taps(Eagle3TrainingOptions(aux_layer_ids="1,4"), info)
    with pytest.raises(ConfigError, match="the target has layers 0 to 7"):
        Eagle3Recipe().taps(Eagle3TrainingOptions(aux_layer_ids="2,9"), info)
