"""A method that finds out behind ``bind`` that it wants fewer drafts than it declared."""

from __future__ import annotations

import pytest
from specdecode import LLM, SamplingParams
from specdecode.plugins import PluginError
from specdecode.testing import scripted
from specdecode.testing.recording import recording
from specdecode.testing.scripted.draft_model import DraftModelProposer
from specdecode.testing.scripted.oracle import OracleProposer

scripted.install()
PROMPT = [5, 9, 17, 20]


def engine_of(target, config=None, **options):
    defaults = {
        "dtype": "float32",
        "device": "cpu",
        "max_model_len": 96,
        "num_gpu_blocks_override": 100,
        "max_num_seqs": 4,
        "skip_tokenizer_init": True,
    }
    return LLM(str(target), speculative_config=config, **(defaults | options))


def output(llm):
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    return llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)[0].outputs[0]


@pytest.fixture
def wants(monkeypatch):
    """``wants(proposer, most)``: of all of its kind, from ``bind`` on."""

    def make(kind, most):
        bind = kind.bind

        def bound(self, resources):
            bind(self, resources)
            self.most = most

        monkeypatch.setattr(kind, "bind", bound)

    return make


@pytest.fixture(scope="module")
def text(tiny_target):
    with engine_of(tiny_target) as llm:
        return list(output(llm).token_ids)


@pytest.mark.parametrize("late", [False, True], ids=["plain", "late"])
@pytest.mark.parametrize("most", [None, 2])
def test_no_step_is_wider(tiny_target, text, wants, late, most):
    wants(OracleProposer, most)
    name = f"most-{most}-{late}"
    oracle = {"method": "scripted-oracle", "num_speculative_tokens": 5, "texts": [PROMPT + text]}
    config = {"method": "scripted-recorder", "inner": oracle, "recording": name}
    with engine_of(tiny_target, config, async_scheduling=late) as llm:
        completion = output(llm)
        assert list(completion.token_ids) == text
    width = most or 5
    assert max(record.budget for record in recording(name).drafts) == width
    assert max(record.room for record in recording(name).drafts) == width
    # One from the prompt, then blocks of as many drafts as there are and the token behind them.
    blocks = ["target", *(["draft"] * width + ["target"]) * 30]
    assert list(completion.token_sources)[:29] == blocks[:29]


@pytest.mark.parametrize("late", [False, True], ids=["plain", "late"])
def test_on_the_device_too(tiny_target, text, wants, late):
    wants(DraftModelProposer, 2)
    config = {"method": "scripted-self-draft", "num_speculative_tokens": 5}
    with engine_of(tiny_target, config, async_scheduling=late) as llm:
        completion = output(llm)
        values = {metric.name: metric.value for metric in llm.get_metrics()}
    assert list(completion.token_ids) == text
    drafts = values["vllm:spec_decode_num_draft_tokens"] / values["vllm:spec_decode_num_drafts"]
    assert 1.8 < drafts <= 2
    assert len(values["vllm:spec_decode_num_accepted_tokens_per_pos"]) == 2


@pytest.mark.parametrize("most", [0, 6])
def test_what_cannot_be_is_the_methods_fault(tiny_target, wants, most):
    wants(OracleProposer, most)
    config = {"method": "scripted-oracle", "num_speculative_tokens": 5, "texts": []}
    with pytest.raises(PluginError, match=f"'scripted-oracle' declares .*width=5, and behind bind .*={most}"):
        engine_of(tiny_target, config)
