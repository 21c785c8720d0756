"""Every example of ``examples/seeds`` on a tiny model, against the same run without speculation."""

from __future__ import annotations

import logging
import re
import runpy
from pathlib import Path

import pytest
import torch
from specdec_eagle.testing import write_head
from specdec_mlp.testing import write_speculator
from specdecode import LLM, SamplingParams
from specdecode.config import SpeculativeConfig
from specdecode.contract import SpecdecodeError
from specdecode.testing.ranks import ranks_in_threads
from specdecode.testing.tiny import tiny_checkpoint

FOLDER = Path(__file__).resolve().parent.parent / "examples/seeds"
GREEDY = {"temperature": 0.0}

#: Example -> parameters of its requests, one for all or one for each, and a line it prints, if any.
EXAMPLES = {
    "llm_1_basic_ngram": (SamplingParams(max_tokens=100, **GREEDY), "Prompt: The capital of France is"),
    "llm_5_suffix": (SamplingParams(max_tokens=200, **GREEDY), None),
    "llm_6_conditional": (SamplingParams(max_tokens=50), None),
    "llm_speculative_config": (SamplingParams(max_tokens=50, **GREEDY), "ngram 5"),
    "generate_1_basic": (SamplingParams(max_tokens=50, **GREEDY), "Finish reason: length"),
    "generate_3_mixed_lengths": (
        [SamplingParams(max_tokens=n, **GREEDY) for n in (10, 300, 100)],
        "Generated tokens: 300",
    ),
    "generate_4_tokens_prompt": (SamplingParams(max_tokens=100, **GREEDY), "Generated: "),
    "generate_6_progress_bar": (SamplingParams(max_tokens=100, **GREEDY), "Generated 20 outputs"),
    "pattern_adaptive": (SamplingParams(max_tokens=50, **GREEDY), None),
    "pattern_task_specific": (SamplingParams(max_tokens=50, **GREEDY), None),
    "guide_ngram_old_spelling": (SamplingParams(), None),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A model whose outputs run in circles, so that prompt lookup finds something."""
    torch.set_num_threads(1)
    return str(tiny_checkpoint(tmp_path_factory.mktemp("tiny"), zero_outputs=True))


@pytest.fixture(scope="module")
def plain(checkpoint):
    def run(prompts, params):
        with LLM(checkpoint) as llm:
            return llm.generate(prompts, params, use_tqdm=False)

    return run


@pytest.fixture
def run_example(checkpoint, monkeypatch):
    monkeypatch.setenv("SPECDECODE_EXAMPLE_MODEL", checkpoint)
    monkeypatch.setattr("sys.argv", ["example"])
    monkeypatch.syspath_prepend(FOLDER)
    return lambda name: runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")


def metrics_of(llm):
    return {metric.name: metric.value for metric in llm.get_metrics()}


def test_each_example_is_run_and_listed():
    names = {path.stem for path in FOLDER.glob("*.py")} - {"example_model"}
    assert names == set(EXAMPLES)
    listed = set(re.findall(r"`(\w+)\.py`", (FOLDER / "README.md").read_text(encoding="utf-8")))
    assert listed == names


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_and_gives_what_it_would_without_speculation(name, run_example, plain, capsys):
    params, line = EXAMPLES[name]
    found = run_example(name)
    outputs, llm = found["outputs"], found.get("llm") or found["code_llm"]
    expected = plain([{"prompt_token_ids": output.prompt_token_ids} for output in outputs], params)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]
    assert llm.llm_engine.method == ("suffix" if name == "llm_5_suffix" else "ngram")
    assert "vllm:spec_decode_num_drafts" in metrics_of(llm)
    assert line is None or line in capsys.readouterr().out
    llm.shutdown()


def test_prompt_lookup_drafts_in_the_examples(run_example):
    llm = run_example("generate_6_progress_bar")["llm"]
    assert metrics_of(llm)["vllm:spec_decode_num_accepted_tokens"] > 0


def test_the_large_batch_is_not_speculated_on(run_example):
    found = run_example("llm_6_conditional")
    ended_early = sum(output.outputs[0].finish_reason == "stop" for output in found["outputs"])
    # Ten requests run side by side; drafts begin when fewer than eight are left.
    assert metrics_of(found["llm"])["vllm:spec_decode_num_drafts"] == 0 or ended_early > 2


def test_the_old_spelling_is_told_once(run_example, caplog):
    run_example("guide_ngram_old_spelling")["llm"].shutdown()
    (message,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "write speculative_config={'method': 'ngram', 'num_speculative_tokens': 5" in message


def test_the_documents_way_to_read_metrics(checkpoint):
    """Examples 2 and 5 of the documents, with the method that exists."""
    llm = LLM(checkpoint, speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    outputs = llm.generate(
        ["The Eiffel Tower is located in"], SamplingParams(temperature=0.0, max_tokens=50, logprobs=5)
    )
    assert all(5 <= len(entry) <= 6 for entry in outputs[0].outputs[0].logprobs)
    metrics = llm.get_metrics()
    num_drafts = sum(m.value for m in metrics if m.name == "vllm:spec_decode_num_drafts")
    num_accepted = sum(m.value for m in metrics if m.name == "vllm:spec_decode_num_accepted_tokens")
    assert 1 <= 1 + num_accepted / num_drafts <= 4
    assert {m.name for m in metrics if "spec_decode" in m.name} >= {
        "vllm:spec_decode_num_draft_tokens",
        "vllm:spec_decode_num_accepted_tokens_per_pos",
    }
    llm.shutdown()


def test_the_old_spelling_of_a_draft_model_works(checkpoint, caplog):
    today = {"model": checkpoint, "num_speculative_tokens": 5}
    llm = LLM(checkpoint, speculative_model=checkpoint, num_speculative_tokens=5)
    assert f"write speculative_config={today!r}" in caplog.text
    assert llm.llm_engine.method == "draft_model"
    (output,) = llm.generate([{"prompt_token_ids": [5, 6, 7]}], SamplingParams(temperature=0.0, max_tokens=9))
    assert output.metrics.accepted == output.metrics.drafted > 0
    llm.shutdown()


def test_an_old_spelling_is_translated_before_it_is_told_what_is_missing(checkpoint, caplog):
    today = {"model": checkpoint, "draft_tensor_parallel_size": 1}
    with pytest.raises(SpecdecodeError, match="num_speculative_tokens is required"):
        LLM(checkpoint, speculative_model=checkpoint, speculative_draft_tensor_parallel_size=1)
    assert f"write speculative_config={today!r}" in caplog.text


def test_a_config_is_a_mapping_with_its_keys_as_attributes():
    config = SpeculativeConfig({"method": "ngram"}, num_speculative_tokens=5)
    assert dict(config) == {"method": "ngram", "num_speculative_tokens": 5}
    assert config.num_speculative_tokens == 5


#: The documents' examples with ``tensor_parallel_size=4``: their keys, and the kind of checkpoint they name.
ON_FOUR_RANKS = {
    "eagle3": {
        "speculative_config": {
            "method": "eagle3",
            "num_speculative_tokens": 3,
            "draft_tensor_parallel_size": 1,
            "aux_layer_ids": [1, 2, 3],  # the tiny target has few layers
        }
    },
    "mlp_speculator": {"speculative_config": {"draft_tensor_parallel_size": 1}},
    "mlp_speculator, old spelling": {"speculative_draft_tensor_parallel_size": 1},
}


@pytest.mark.parametrize("example", ON_FOUR_RANKS)
def test_the_documents_examples_on_four_ranks(example, tmp_path):
    target = str(tiny_checkpoint(tmp_path / "target", output_scale=0.3, num_hidden_layers=4))
    if example == "eagle3":
        head = str(write_head(tmp_path / "head", "eagle3", target))
    else:
        head = str(write_speculator(tmp_path / "speculator", target, fit=False))
    keywords = ON_FOUR_RANKS[example]
    if "speculative_config" in keywords:
        keywords = {"speculative_config": {**keywords["speculative_config"], "model": head}}
    else:
        keywords = {**keywords, "speculative_model": head}
    common = {"gpu_memory_utilization": 0.85, "dtype": "float32", "device": "cpu"}
    prompts = ["Write a detailed essay about climate change."]
    params = SamplingParams(max_tokens=40, temperature=0.0)
    with LLM(target, **common) as llm:
        (plain,) = llm.generate(prompts, params, use_tqdm=False)
    with ranks_in_threads():
        llm = LLM(target, tensor_parallel_size=4, **common, **keywords)
    (output,) = llm.generate(prompts, params, use_tqdm=False)
    assert llm.llm_engine.method == example.split(",")[0]
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids
    assert metrics_of(llm)["vllm:spec_decode_num_draft_tokens"] > 0
    llm.shutdown()
