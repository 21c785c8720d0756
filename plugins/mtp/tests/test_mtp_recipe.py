"""The recipe: what is trained is what the plugin runs, and a few steps teach it something."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from specdecode import SamplingParams
from specdecode.contract import FINAL, ConfigError
from specdecode.plugins import default_manager, prepare
from specdecode.testing.reference import DenseStep, StatelessDrafter, dense_forward
from specdecode.testing.tiny import loaded, tiny_checkpoint

pytest.importorskip("specdec_train")

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("recipe") / "target", "qwen2", output_scale=0.2)


@pytest.fixture(scope="module")
def loaded_target(target):
    return loaded(target)


@pytest.fixture
def training(loaded_target):
    from specdec_train.recipe import TrainingTarget

    model, info = loaded_target
    return TrainingTarget(
        info=info,
        device=CPU,
        dtype=torch.float32,
        embed=model.embed_tokens.weight,
        lm_head=model.compute_logits(torch.eye(64)).T.contiguous(),
        norm=model.norm.weight.float(),
        rms_norm_eps=model.config.rms_norm_eps,
        counts=torch.arange(300, 0, -1),
        load_weights=lambda: iter(()),
    )


def batch(model, texts):
    """Texts of one length, a row each."""
    from specdec_train.recipe import Batch

    ids = torch.tensor(texts)
    states = torch.stack([dense_forward(model, text, [FINAL])[1][0] for text in texts])
    return Batch(
        ids=ids,
        answer=torch.ones_like(ids, dtype=torch.bool),
        documents=torch.zeros_like(ids),
        positions=torch.arange(ids.shape[1]).expand_as(ids),
        features={"final": states.clone()},
    )


def greedy(model, count, length):
    """Texts that the model goes on with."""
    rng = np.random.default_rng(1)
    texts = [rng.integers(3, 300, 3).tolist() for _ in range(count)]
    for text in texts:
        while len(text) < length:
            hidden, _ = dense_forward(model, text)
            text.append(int(model.compute_logits(hidden[-1:]).argmax()))
    return texts


def recipe():
    return next(recipe for recipe in default_manager().recipes() if recipe.name == "mtp")


@pytest.mark.parametrize("changes", [{}, {"intermediate_size": 48, "loss_vocab_size": 120}])
def test_what_is_trained_is_what_the_plugin_runs(changes, target, loaded_target, training, tmp_path):
    """The published checkpoint drafts what the trainee drafts, fed with its own output at each pass."""
    from specdec_train.publishing import write_checkpoint

    (model, info), taught = loaded_target, recipe()
    torch.manual_seed(0)
    trainee = taught.build(taught.options(**changes), training)
    with torch.no_grad():
        for name, weight in trainee.named_parameters():
            if "norm" not in name:
                weight.add_(0.1 * torch.randn_like(weight))
    path = write_checkpoint(trainee.checkpoint(), tmp_path / "made", target, dtype=torch.float32)
    assert prepare(default_manager(), {"model": str(path)}, info).method == "mtp"
    text = greedy(model, 1, 12)[0]
    drafter = StatelessDrafter(model, info, {"model": str(path), "num_speculative_tokens": 3})
    params = SamplingParams(temperature=0, max_tokens=20)
    ids, _ = drafter.drafts(DenseStep(history=text, prompt_len=len(text), params=params, budget=3, room=3))
    # Given that the drafts before were right: the text goes on with them.
    with torch.inference_mode():
        made = trainee.drafts(batch(model, [[*text, *ids]]), 3)[0, len(text) - 1]
    assert made.tolist() == list(ids)


def test_some_steps_teach_it(loaded_target, training):
    (model, _), taught = loaded_target, recipe()
    torch.manual_seed(0)
    trainee = taught.build(taught.options(unrolled=3), training)
    examples = batch(model, greedy(model, 8, 24))
    optimizer = torch.optim.AdamW(trainee.parameters(), 3e-3)
    curve = []
    for _ in range(40):
        loss, terms = trainee.loss(examples)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        curve.append((float(loss.detach()), {name: float(value) for name, value in terms.items()}))
    first, last = curve[0], curve[-1]
    assert last[0] < first[0] - 1.0
    assert all(last[1][f"agree_{level}"] > first[1][f"agree_{level}"] + 0.1 for level in range(3))


def test_targets_of_other_families_are_refused(loaded_target):
    import attrs

    taught = recipe()
    foreign = attrs.evolve(loaded_target[1], native=False, architecture="Glm4MoeForCausalLM")
    with pytest.raises(ConfigError, match="native families, got 'Glm4MoeForCausalLM'"):
        taught.taps(taught.options(), foreign)
