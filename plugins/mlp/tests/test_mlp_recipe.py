"""What is trained is what drafts: the published speculator drafts what training drafts."""

from __future__ import annotations

import math

import attrs
import numpy as np
import pytest
import torch
from specdecode import SamplingParams
from specdecode.testing.reference import DenseStep, StatelessDrafter

pytest.importorskip("specdec_train")

from specdec_mlp.recipe import MlpSpeculatorRecipe, MlpSpeculatorTrainingOptions
from specdec_train.publishing import write_checkpoint
from specdec_train.testing import frozen_target, packed

TEXT = np.random.default_rng(5).integers(3, 300, 12).tolist()
KINDS = {
    "scaled": MlpSpeculatorTrainingOptions(n_predict=3, inner_dim=24),
    "raw": MlpSpeculatorTrainingOptions(n_predict=4, scale_input=False),
    "one": MlpSpeculatorTrainingOptions(n_predict=1, inner_dim=8),
}
every_kind = pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)


@pytest.fixture(scope="session")
def frozen(target, info):
    return frozen_target(target, info)


def built(frozen, options):
    """A trainee none of whose weights is what it began as."""
    torch.manual_seed(1)
    trainee = MlpSpeculatorRecipe().build(options, frozen)
    with torch.no_grad():
        for weight in trainee.parameters():
            weight += 0.1 * torch.randn_like(weight)
    return trainee.eval()


@every_kind
@torch.no_grad()
def test_the_published_speculator_drafts_what_training_drafts(options, frozen, model, info, tmp_path):
    trainee = built(frozen, options)
    path = write_checkpoint(trainee.checkpoint(), tmp_path, tmp_path, dtype=torch.float32)
    drafter = StatelessDrafter(model, info, MlpSpeculatorRecipe().speculative_config(options, path))
    step = DenseStep(
        history=TEXT, prompt_len=len(TEXT), params=SamplingParams(temperature=0), budget=8, room=8
    )
    ids = list(drafter.drafts(step)[0])
    batch = packed(model, ["final"], [7, 8, 9, 10, 11], [*TEXT, *ids])
    assert len(ids) == options.n_predict
    assert trainee.drafts(batch, 5)[0, 5 + len(TEXT) - 1].tolist() == ids


@every_kind
def test_the_loss_has_the_gradient_of_its_own_formula(options, frozen, model):
    trainee = built(frozen, options)
    batch = packed(model, ["final"], [5, 6, 7, 8, 9, 10], TEXT)
    batch = attrs.evolve(batch, answer=batch.positions >= 2)
    loss, _ = trainee.loss(batch)
    loss.backward()
    got = {name: weight.grad.clone() for name, weight in trainee.named_parameters()}
    trainee.zero_grad()
    n, size = options.n_predict, options.inner_dim or 64
    sw = 0.5 ** (0.5 / n)
    ratio = math.sqrt((1 - sw**2) * size / 2) / sw
    final, ids = batch.features["final"][0], batch.ids[0].tolist()

    def rn(x):
        return x / (x.square().mean() + 1e-6).sqrt()

    losses = [[] for _ in range(n)]
    for place in range(1, len(ids)):
        s = rn(final[place - 1]) / math.sqrt(2) if options.scale_input else final[place - 1]
        for k in range(n):
            then = place + k + 1
            if then >= len(ids):
                break
            s = (trainee.later_steps if k else trainee.first) @ s + ratio * trainee.emb[ids[place + k]]
            x = trainee.gain * rn(s) + trainee.shift
            s = 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))
            if batch.documents[0, place - 1] == batch.documents[0, then] and batch.answer[0, then]:
                law = (final[then - 1] @ frozen.lm_head.T).softmax(-1)
                losses[k].append(-(law * (trainee.head @ s).log_softmax(-1)).sum())
    weights = [options.decay**k for k in range(n)]
    total = sum(w * torch.stack(own).mean() for w, own in zip(weights, losses, strict=True)) / sum(weights)
    total.backward()
    torch.testing.assert_close(loss, total, atol=1e-4, rtol=1e-4)
    for name, weight in trainee.named_parameters():
        if weight.grad is not None:
            torch.testing.assert_close(got[name], weight.grad, atol=1e-4, rtol=1e-3, msg=name)
