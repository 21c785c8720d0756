"""Scripts as one writes them for vLLM: with the import changed, and nothing else, they run here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from specdecode import LLM
from specdecode.testing.tiny import tiny_checkpoint

FOLDER = Path(__file__).with_name("vllm_scripts")

#: Script -> a line it prints.
SCRIPTS = {
    "basic": "Prompt:    'The capital of France is'",
    "inputs": "The quick brown fox",
    "chat": "Generated Outputs:",
    "prefix_caching": "Generated answers are the same: True",
    "logprobs": "prompt perplexity:",
    "parallel_sampling": "RequestOutput(request_id='0', prompt='Tell me a story",
    "spec_decode": "vllm:spec_decode_num_accepted_tokens_per_pos (vector) = [",
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    torch.set_num_threads(1)
    return str(tiny_checkpoint(tmp_path_factory.mktemp("tiny"), zero_outputs=True))


@pytest.fixture
def run_script(checkpoint):
    """Runs one; its globals. MODEL stands for the name of a model."""

    def run(name: str) -> dict[str, object]:
        path = FOLDER / f"{name}.py"
        source = path.read_text(encoding="utf-8").replace('"MODEL"', repr(checkpoint))
        source = re.sub(r"^(from|import) vllm\b", r"\1 specdecode", source, flags=re.MULTILINE)
        assert "vllm import" not in source
        found: dict[str, object] = {"__name__": "__main__"}
        exec(compile(source, path, "exec"), found)
        for llm in [value for value in found.values() if isinstance(value, LLM)]:
            llm.shutdown()
        return found

    return run


def test_each_script_is_listed():
    assert {path.stem for path in FOLDER.glob("*.py")} == set(SCRIPTS)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs_with_its_import_changed(run_script, name, capsys):
    found = run_script(name)
    assert SCRIPTS[name] in capsys.readouterr().out
    assert all(output.finished for output in found["outputs"])


def test_all_spellings_of_a_prompt_are_one(run_script):
    outputs = run_script("inputs")["outputs"]
    assert len(outputs) == 9
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    assert len({tuple(output.prompt_token_ids) for output in outputs}) == 1
    texts = [output.prompt for output in outputs]
    assert [text is None for text in texts] == [False, True, False, True, False, False, True, True, True]


def test_the_second_engine_finds_the_prefix(run_script):
    assert min(run_script("prefix_caching")["cached"]) > 0


def test_the_loop_over_metrics_counts_drafts(run_script):
    found = run_script("spec_decode")
    assert found["num_drafts"] > 0
    assert found["num_accepted_tokens"] == sum(found["acceptance_counts"]) > 0
