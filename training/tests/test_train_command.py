"""The gate, exit codes, and what ``--json`` prints."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from specdec_train import gate
from specdec_train.command import recipes

pytestmark = pytest.mark.skipif("draft_model" not in recipes(), reason="specdec-draft is not installed")
#: All of the target: every draft is right, and drafting takes as long as the target itself.
SLOW = {"num_layers": 6, "steps": 1, "learning_rate": 1e-9}
#: Narrow and hardly trained.
BAD = {"num_layers": 1, "hidden_size": 32, "steps": 1, "learning_rate": 1e-9}


def verdict(**changes):
    made = {
        "acceptance_length": 2.5,
        "per_position": (0.9, 0.6),
        "plain_tokens_per_s": 100.0,
        "tokens_per_s": 150.0,
        "identical": True,
        "conformance": "all hold",
        "conforms": True,
    }
    return gate.Verdict(**(made | changes))


def test_what_loses_time_is_refused_unless_forced(train, tmp_path, monkeypatch):
    from specdec_train import pipeline

    monkeypatch.setattr(pipeline, "judge", lambda *args, **options: verdict(tokens_per_s=80.0))
    refused = train("draft_model", tmp_path / "run", **SLOW)
    assert refused.code == 1 and refused.told["published"] is False
    assert "it loses time: 80.0 tokens/s, 100.0 without" in refused.told["error"]
    assert "--force" in refused.told["error"]
    assert (tmp_path / "run/refused/model.safetensors").is_file()
    assert not (tmp_path / "run/checkpoint").exists()
    forced = train("draft_model", tmp_path / "run", "--force", **SLOW)
    assert forced.code == 0 and forced.told["published"]
    assert (tmp_path / "run/checkpoint/model.safetensors").is_file()


def test_what_does_not_conform_is_refused_even_if_forced(train, tmp_path, monkeypatch):
    from specdecode.testing import conformance

    report = SimpleNamespace(summary="3 of 20 fail", ok=False)
    monkeypatch.setattr(conformance, "check_proposer", lambda *args, **options: report)
    refused = train("draft_model", tmp_path / "run", "--force", "--conform", **SLOW)
    assert refused.code == 1 and "the conformance kit fails: 3 of 20 fail" in refused.told["error"]
    assert not (tmp_path / "run/checkpoint").exists()


def test_the_gate_measures_through_the_engine(train, tmp_path):
    """A copy of the target is right throughout; one that has learnt nothing is right by chance."""
    right = train("draft_model", tmp_path / "right", "--force", **SLOW).told
    assert right["gate"]["acceptance_length"] > 4.5 and right["held_out"]["length"] > 4.5
    assert right["gate"]["conformance"] == "not run"
    wrong = train("draft_model", tmp_path / "wrong", **BAD)
    assert wrong.code == 1
    assert "no draft was accepted" in wrong.told["error"] or "loses time" in wrong.told["error"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"steps": None}, "--steps, --minutes, or both"),
        ({"temperatures": "0,hot"}, "temperatures must be numbers"),
        ({"data": "nowhere.jsonl"}, "cannot read nowhere.jsonl"),
        ({"model": "/no/such/model"}, "does not exist"),
        ({"device": "tpu"}, "device must be one torch can use here, got 'tpu'"),
        ({"num_layers": 2, "layers": "0,9"}, "layers 0 to 5"),
        ({"layers": "a"}, "layers must be numbers"),
    ],
)
def test_what_does_not_fit_is_an_error_with_status_1(train, tmp_path, changes, words):
    done = train("draft_model", tmp_path / "run", **changes)
    assert done.code == 1 and done.told["published"] is False and words in done.told["error"]


def test_wrong_usage_has_status_2(train, tmp_path):
    assert train("draft_model", tmp_path / "run", "--no-such-option").code == 2
    assert train("draft_model", tmp_path / "run", batch_rows="many").code == 2
    assert train("no_such_method", tmp_path / "run").code == 2


@pytest.mark.parametrize(
    ("changes", "faults"),
    [
        ({}, []),
        ({"acceptance_length": 1.0}, ["no draft was accepted"]),
        ({"tokens_per_s": 100.0}, ["loses time"]),
        ({"conforms": False, "tokens_per_s": 90.0}, ["conformance", "loses time"]),
    ],
)
def test_faults_of_a_verdict(changes, faults):
    found = verdict(**changes).faults
    assert len(found) == len(faults)
    assert all(word in fault for word, fault in zip(faults, found, strict=True))


def test_what_is_no_recipe_is_told(monkeypatch, caplog):
    from specdecode.plugins import PluginManager

    given = [type(recipes()["draft_model"]), "eagle"]  # the class, and its name
    monkeypatch.setattr(PluginManager, "recipes", lambda self: given)
    assert recipes() == {}
    assert [record.args[0] for record in caplog.records] == given
    assert "must yield instances of specdec_train.recipe.Recipe, got 'eagle'" in caplog.text
