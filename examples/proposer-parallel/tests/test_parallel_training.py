"""What is trained is what drafts, and training pays."""

from __future__ import annotations

import json

import pytest
import torch
from specdecode import SamplingParams
from specdecode.cli.app import app
from specdecode.testing.conformance import toy
from specdecode.testing.reference import DenseStep, StatelessDrafter
from specdecode.testing.tiny import favour, table_checkpoint
from typer.testing import CliRunner

pytest.importorskip("specdec_train")

VOCAB = 120
#: Small enough for a few seconds; the loss looks at all tokens.
OPTIONS = {
    "dtype": "float32",
    "device": "cpu",
    "data-tokens": 1500,
    "answer-tokens": 32,
    "prompt-tokens": 64,
    "held-out": 8,
    "batch-size": 16,
    "row-tokens": 96,
    "batch-rows": 6,
    "evaluate-every": 60,
    "weights-dtype": "float32",
    "gate-prompts": 2,
    "gate-tokens": 16,
    "hidden-size": 24,
    "num-heads": 3,
    "intermediate-size": 48,
    "num-draft-tokens": 3,
}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """The next token follows from the last one, along a ring of 40."""
    torch.set_num_threads(1)
    ring = {token: 50 + (7 * token + 1) % 40 for token in range(VOCAB)}
    return table_checkpoint(
        tmp_path_factory.mktemp("train") / "target",
        favour(ring, vocab_size=VOCAB),
        num_hidden_layers=3,
        max_position_embeddings=256,
    )


def train(target, folder, steps):
    prompts = folder / "prompts.jsonl"
    words = ["".join(chr(97 + (i * step) % 26) for step in (1, 3, 7, 11)) for i in range(90)]
    prompts.write_text("".join(json.dumps({"prompt": word}) + "\n" for word in words))
    given = {"model": target, "data": prompts, "out": folder / "run", "steps": steps, **OPTIONS}
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    told = CliRunner().invoke(app, ["train", "parallel", *words, "--no-conform", "--force", "--json"])
    assert told.exit_code == 0, told.output
    return json.loads(told.stdout)


def test_training_teaches_every_place_of_a_draft(target, tmp_path):
    """The gate runs what was published through the engine: there as many drafts are accepted."""
    found = train(target, tmp_path, 120)
    first, second, third = found["held_out"]["per_position"][:3]
    assert first > 0.95 and second > 0.4 and third > 0.2  # by chance: 1 in 40
    assert found["gate"]["identical"]
    assert found["gate"]["acceptance_length"] == pytest.approx(found["held_out"]["length"], abs=0.5)


@pytest.mark.parametrize("num_draft_tokens", [1, 4])
@torch.no_grad()
def test_the_published_drafter_drafts_what_training_drafts(target, tmp_path, num_draft_tokens):
    from specdec_train.publishing import write_checkpoint
    from specdec_train.testing import frozen_target, packed

    from specdec_parallel.recipe import ParallelRecipe, ParallelTrainingOptions

    model, recipe = toy(target), ParallelRecipe()
    options = ParallelTrainingOptions(
        num_draft_tokens=num_draft_tokens, hidden_size=24, num_heads=3, intermediate_size=48
    )
    frozen = frozen_target(target, model.info)
    torch.manual_seed(1)
    trainee = recipe.build(options, frozen)
    for weight in trainee.parameters():
        weight += 0.2 * torch.randn_like(weight)
    path = write_checkpoint(trainee.checkpoint(), tmp_path, tmp_path, dtype=torch.float32)
    drafter = StatelessDrafter(model.model, model.info, recipe.speculative_config(options, path))
    for length in (2, 9):
        text = torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist()
        step = DenseStep(
            history=text, prompt_len=length, params=SamplingParams(temperature=0), budget=8, room=8
        )
        ids = list(drafter.drafts(step)[0])
        # Behind another document in the same row.
        batch = packed(model.model, recipe.taps(options, model.info), [7, 8, 9, 10, 11], text)
        assert trainee.drafts(batch, 8)[0, -1].tolist() == ids and len(ids) == num_draft_tokens
