"""From prompts to a published checkpoint that its plugin loads, for each recipe."""

from __future__ import annotations

import json
import os

import pytest
from specdec_train.command import recipes
from specdecode import LLM, SamplingParams
from specdecode.models import fingerprint, resolve_model

#: Method -> options beside those that all tests share.
RECIPES = {
    "eagle": {"intermediate_size": 64, "unrolled": 3},
    "eagle3": {"aux_layer_ids": "2,3,4", "draft_vocab_size": 80, "unrolled": 3},
    "draft_model": {"num_layers": 1, "hidden_size": 64, "learning_rate": 1e-2, "steps": 160},
    "medusa": {"num_heads": 3, "learning_rate": 2e-2},
    "mlp_speculator": {"n_predict": 3, "inner_dim": 64, "learning_rate": 1e-2},
    "mtp": {"learning_rate": 5e-3},
}
UNTRAINED = {"steps": 1, "learning_rate": 1e-9}


@pytest.mark.parametrize("method", RECIPES)
def test_what_is_trained_is_published_and_drafts_better_than_what_is_not(method, train, target, tmp_path):
    if method not in recipes():
        pytest.skip(f"no installed plugin trains {method}")
    own = RECIPES[method]
    done = train(method, tmp_path / "run", "--force", **own)
    assert done.code == 0, done.stdout + done.stderr
    assert done.told["published"] and done.told["path"] == str(tmp_path / "run/checkpoint")
    losses = [point["loss"] for point in done.told["curve"]]
    assert len(losses) >= 3 and losses[-1] < 0.9 * losses[0]
    before = train(method, tmp_path / "untrained", "--force", **{**own, **UNTRAINED}).told
    for stage, figure in (("held_out", "length"), ("gate", "acceptance_length")):
        assert done.told[stage][figure] > before[stage][figure] + 0.5
    assert done.told["gate"]["identical"]

    checkpoint = tmp_path / "run/checkpoint"
    stored = json.loads((checkpoint / "training.json").read_text("utf-8"))
    assert stored["target_fingerprint"] == fingerprint(resolve_model(target))
    assert stored["model"] == "target" and str(tmp_path) not in json.dumps(stored)
    assert os.stat(checkpoint / "model.safetensors").st_mode & 0o044 == 0o044
    readme = (checkpoint / "README.md").read_text("utf-8")
    assert f"specdecode train {method}" in readme and f"{stored['held_out']['length']:.2f}" in readme

    config = {**stored["speculative_config"], "model": str(checkpoint)}
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False)
    options = {"dtype": "float32", "device": "cpu", "num_gpu_blocks_override": 64}
    written = []
    for speculative_config in (config, None):
        with LLM(str(target), speculative_config=speculative_config, **options) as llm:
            output = llm.generate([{"prompt_token_ids": [7, 8, 9]}], params, use_tqdm=False)[0]
            written.append(list(output.outputs[0].token_ids))
    assert written[0] == written[1]


def test_fresh_states_train_as_stored_ones_do_and_store_none(train, tmp_path):
    if "eagle3" not in recipes():
        pytest.skip("specdec-eagle is not installed")
    curves = []
    for flags in (["--fresh-states"], []):
        work = tmp_path / f"work-{len(flags)}"
        own = RECIPES["eagle3"] | {"steps": 40, "work": work}
        done = train("eagle3", tmp_path / f"run-{len(flags)}", "--force", "--no-gate", *flags, **own)
        assert done.code == 0, done.stdout + done.stderr
        assert bool(list(work.glob("*/states-*"))) == (not flags)
        curves.append([point["loss"] for point in done.told["curve"]])
    assert len(curves[0]) >= 2 and curves[0] == pytest.approx(curves[1], rel=1e-3)


class Killed(BaseException):
    """As if the process ended."""


@pytest.mark.parametrize("method", ["eagle3"])
def test_a_run_that_is_killed_again_and_again_ends_as_one_that_is_not(method, train, tmp_path, monkeypatch):
    if method not in recipes():
        pytest.skip(f"no installed plugin trains {method}")
    from specdec_train import telling

    options = {**RECIPES[method], "save_minutes": 1e-9, "steps": 70, "batch_size": 4, "work": None}
    whole = train(method, tmp_path / "whole", "--force", **options)
    assert whole.code == 0, whole.stdout + whole.stderr

    tell = telling._Told.advance
    reached, end = [], ("", 0)

    def advance(self, done, detail):
        reached.append(self._name)
        if (self._name, reached.count(self._name)) == end:
            raise Killed
        tell(self, done, detail)

    monkeypatch.setattr(telling._Told, "advance", advance)
    for end in (("answers", 1), ("states", 1), ("training", 2), ("training", 1)):  # noqa: B007 (advance reads it)
        reached.clear()
        with pytest.raises(Killed):
            train(method, tmp_path / "killed", "--force", **options)
    end = ("", 0)
    reached.clear()
    resumed = train(method, tmp_path / "killed", "--force", **options)
    assert resumed.code == 0 and "answers" not in reached and "states" not in reached
    first, second = (
        (tmp_path / run / "checkpoint/model.safetensors").read_bytes() for run in ("whole", "killed")
    )
    assert first == second
    assert [p["loss"] for p in resumed.told["curve"]] == [p["loss"] for p in whole.told["curve"]]
    assert resumed.told["held_out"] == whole.told["held_out"]
    again = train(method, tmp_path / "killed", "--force", **options)
    assert again.code == 0 and again.told["steps"] == 70

    other = train(method, tmp_path / "killed", "--force", **{**options, "unrolled": 2})
    assert other.code == 1 and "other options.unrolled" in other.told["error"]
