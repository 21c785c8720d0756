"""How many ranks share a draft out where nothing is said: by arithmetic, on a GPU alone."""

import json
import types

import pytest
from specdec_draft.config import DraftModelConfig
from specdec_draft.plan import plan
from specdecode.contract import CheckpointInfo, Probs, TargetInfo

#: Hidden and inner width, query and KV heads, their dimension: of Llama-3.2-1B and SmolLM2-135M.
LARGE, SMALL = (2048, 8192, 32, 8, 64), (576, 1536, 9, 3, 64)


@pytest.fixture
def planned(tmp_path):
    """``planned(sizes, ranks)``: of a draft beside a target of so many ranks."""

    def made(sizes, ranks, device="cuda", config=None, **options):
        hidden, inner, heads, kv_heads, dim = sizes
        of_draft = {
            "architectures": ["LlamaForCausalLM"], "hidden_size": hidden, "intermediate_size": inner,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": dim,
            "num_hidden_layers": 4, "vocab_size": 100, "max_position_embeddings": 512, **(config or {}),
        }  # fmt: skip
        (tmp_path / "config.json").write_text(json.dumps(of_draft))
        target = TargetInfo(
            path=str(tmp_path), architecture="LlamaForCausalLM", vocab_size=100, hidden_size=4096,
            num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128, max_model_len=512, dtype="bfloat16",
            device=device, tensor_parallel_size=ranks,
        )  # fmt: skip
        draft = CheckpointInfo(path=tmp_path, config=of_draft, tensors={}, dummy=True)
        context = types.SimpleNamespace(target=target, draft=draft, probs=Probs.NONE)
        wanted = DraftModelConfig(model=str(tmp_path), num_speculative_tokens=3, **options)
        return plan(wanted, context).ranks

    return made


@pytest.mark.parametrize(
    ("sizes", "ranks", "expected"), [(LARGE, 2, 2), (LARGE, 4, 4), (LARGE, 1, 1), (SMALL, 3, 1)]
)
def test_what_reading_less_is_worth(planned, sizes, ranks, expected):
    assert planned(sizes, ranks) == expected


def test_a_draft_that_cannot_be_divided_is_whole_on_every_rank(planned):
    hidden, inner, _, kv_heads, dim = LARGE
    assert planned((hidden, inner, 33, kv_heads, dim), 2) == 1
    assert planned((hidden, inner + 1, 32, kv_heads, dim), 2) == 1
    assert planned((hidden, inner, 32, 1, dim), 2) == 2  # each rank holds the one head of keys


def test_what_is_said_counts(planned):
    assert planned(LARGE, 2, draft_tensor_parallel_size=1) == 1
    assert planned(SMALL, 3, draft_tensor_parallel_size=3) == 3


def test_on_a_cpu_and_quantised_a_draft_is_whole(planned):
    assert planned(LARGE, 2, device="cpu") == 1
    stored = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
    assert planned(LARGE, 2, config={"quantization_config": stored}) == 1
