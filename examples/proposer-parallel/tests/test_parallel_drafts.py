"""What is refused, and that output does not depend on what is drafted."""

from pathlib import Path

import attrs
import pytest
import torch
from safetensors.torch import load_file, save_file
from specdecode import LLM, SamplingParams
from specdecode.contract import ConfigError, Unsupported
from specdecode.plugins import default_manager, prepare
from specdecode.testing.conformance import toy
from specdecode.testing.tiny import tiny_checkpoint

from specdec_parallel.proposer import _Pass
from specdec_parallel.testing import shape_for, write_drafter

PROMPTS = [{"prompt_token_ids": [7, 8, 9]}, {"prompt_token_ids": [11]}, {"prompt_token_ids": [5, 9] * 20}]
PARAMETERS = [
    SamplingParams(max_tokens=40, ignore_eos=True),
    SamplingParams(max_tokens=40, ignore_eos=True, temperature=1.0, seed=5),
    SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.7, top_p=0.9, seed=6),
]


@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_the_output_is_what_it_is_without_speculation(tmp_path, length, method):
    torch.set_num_threads(1)
    model = tiny_checkpoint(tmp_path / "target", output_scale=0.2)
    options = dict(model=str(model), skip_tokenizer_init=True, device="cpu", dtype="float32", max_num_seqs=2)
    with LLM(**options) as llm:
        plain = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, PARAMETERS)]
        info = llm.llm_engine.target
    spec = {
        "model": str(write_drafter(tmp_path / "drafter", shape_for(info))),  # recognised by its config
        "num_speculative_tokens": length,
        "draft_sample_method": method,
    }
    with LLM(**options, speculative_config=spec) as llm:
        drafted = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, PARAMETERS)]
        metrics = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    assert drafted == plain
    assert metrics["vllm:spec_decode_num_draft_tokens"] > 20 * length


def test_a_pass_holds_each_row_s_fed_tokens_and_its_masks_behind_them():
    places = _Pass.of(torch.tensor([0, 0, 2]), 3, 2)  # row 1 is fed nothing
    fed, masks = torch.tensor([10, 11, 12]), torch.tensor([[-1, -2], [-3, -4], [-5, -6]])
    assert places.join(fed, masks).tolist() == [10, 11, -1, -2, -3, -4, 12, -5, -6]
    assert places.rows.tolist() == [0, 0, 0, 0, 1, 1, 2, 2, 2]
    assert _Pass.of(torch.tensor([0, 1]), 2, 0).join(fed[:2], masks[:2, :0]).tolist() == [10, 11]


def refusal(path, **keys):
    with pytest.raises((ConfigError, Unsupported)) as caught:
        prepare(default_manager(), {"method": "parallel", "model": str(path), **keys}, toy().info)
    return str(caught.value)


@pytest.mark.parametrize(
    ("fields", "keys", "told"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, {}, "is no parallel drafter"),
        ({"num_heads": None, "num_layers": None}, {}, "lacks num_heads, num_layers"),
        ({"head_dim": 0}, {}, "head_dim of config.json must be a positive integer"),
        ({"num_kv_heads": 2}, {}, "num_heads 3 is no multiple of num_kv_heads 2"),
        ({"taps": [1, 99]}, {}, "taps must be different boundaries, 0 to 2"),
        ({"taps": ["final", "final"]}, {}, "taps must be different boundaries"),
        ({"target_hidden_size": 99}, {}, "it was trained for another model"),
        ({"hidden_size": 32}, {}, "config.json makes it (32,)"),
        ({}, {"num_speculative_tokens": 5}, "was trained for 4: lower it"),
        ({}, {"dtype": "float16"}, "must be the target's"),
    ],
)
def test_what_does_not_fit_is_refused_before_a_weight_is_read(tmp_path, fields, keys, told):
    path = write_drafter(tmp_path, shape_for(toy().info), **fields)
    assert told in refusal(path, **keys)


def test_the_drafter_that_comes_along_fits_its_target():
    path = Path(__file__).parents[1] / "drafter-smollm2"
    smollm2 = attrs.evolve(toy().info, hidden_size=576, num_layers=30, vocab_size=49152, tokenizer=None)
    prepared = prepare(default_manager(), {"model": str(path)}, smollm2)
    assert prepared.method == "parallel" and prepared.needs.width == 4
    assert [tap.boundary for tap in prepared.needs.taps] == [20, "final"]


def test_a_checkpoint_that_lacks_a_tensor_is_refused_by_its_name(tmp_path):
    path = write_drafter(tmp_path, shape_for(toy().info))
    tensors = load_file(path / "model.safetensors")
    del tensors["mask"], tensors["out.weight"]
    save_file(tensors, path / "model.safetensors")
    told = refusal(path)
    assert "lacks the tensor mask" in told and "lacks the tensor out.weight" in told
