"""Heads on a GPU: by fused kernels, drafting inside the captured step; the same tokens as without them."""

from __future__ import annotations

import pytest
import torch
from specdec_eagle.head import EagleHead
from specdec_eagle.testing import write_head
from specdecode import LLM, SamplingParams
from specdecode.engine.overlapped import OverlappedEngineCore
from specdecode.models.fused import SWITCH

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def captured_steps(monkeypatch):
    """Graphs: checking each step's writes, as other tests of a run may ask for, would forbid them."""
    monkeypatch.delenv("SPECDECODE_CHECK_WRITES", raising=False)


TREE = "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]"
SHAPES = {
    "chain": {"num_speculative_tokens": 3},
    "chain-greedy": {"num_speculative_tokens": 3, "draft_sample_method": "greedy"},
    "fixed": {"speculative_token_tree": TREE},
    "grown": {"num_speculative_tokens": 8, "tree_top_k": 3, "tree_depth": 3},
    "grown-by-cost": {"tree_top_k": 3, "tree_depth": 3},
}
HEADS = {"eagle": ("eagle", {}), "eagle3": ("eagle3", {"draft_vocab": 150})}


@pytest.fixture(scope="module")
def heads(target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("heads")
    return {name: write_head(folder / name, layout, target, **kw) for name, (layout, kw) in HEADS.items()}


def run(target, config, dtype, **options):
    """Ids of each request, and how many drafts were accepted."""
    prompts = [[3 + (7 * i + j) % 290 for j in range(4 + 9 * i)] for i in range(5)]
    kinds = (
        {"temperature": 0},
        {"temperature": 0.9, "seed": 5, "top_p": 0.9},
        {"temperature": 1.0, "seed": 6},
    )
    params = [SamplingParams(max_tokens=24, ignore_eos=True, **kinds[i % 3]) for i in range(5)]
    with LLM(
        str(target),
        dtype=dtype,
        max_model_len=96,
        num_gpu_blocks_override=200,
        skip_tokenizer_init=True,
        speculative_config=config,
        **{"max_num_seqs": 8, **options},
    ) as llm:
        outputs = llm.generate([{"prompt_token_ids": own} for own in prompts], params, use_tqdm=False)
        values = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    return [list(out.outputs[0].token_ids) for out in outputs], values


@pytest.fixture(scope="module")
def plain(target):
    return {dtype: run(target, None, dtype)[0] for dtype in ("float32", "bfloat16")}


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("head", HEADS)
def test_the_same_tokens_as_without(target, heads, plain, head, shape, dtype, eager):
    config = {"model": str(heads[head]), **SHAPES[shape]}
    ids, values = run(target, config, dtype, enforce_eager=eager)
    assert ids == plain[dtype]
    assert values["vllm:spec_decode_num_accepted_tokens"] > 0 or shape == "chain-greedy"
    assert not values.get("specdecode:proposer_failures")


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("shape", ["fixed", "grown"])
@pytest.mark.parametrize("head", HEADS)
def test_one_request_at_a_time_drafts_as_many_do(target, heads, plain, head, shape, eager):
    """The root's feature of a single row is a view that stands for all of its children."""
    config = {"model": str(heads[head]), **SHAPES[shape]}
    alone, many = (
        run(target, config, "float32", enforce_eager=eager, max_num_seqs=count) for count in (1, 8)
    )
    assert alone[0] == many[0] == plain["float32"]
    accepted = [values["vllm:spec_decode_num_accepted_tokens"] for _, values in (alone, many)]
    assert accepted[0] == accepted[1] > 0


@pytest.mark.parametrize("head", HEADS)
def test_graphs_draft_what_is_drafted_without(target, heads, head, monkeypatch):
    config = {"model": str(heads[head]), "num_speculative_tokens": 3}
    # Without graphs the step of a prompt would draft as well.
    monkeypatch.setattr(OverlappedEngineCore, "_drafted_later", lambda core, request: True)
    accepted = {
        eager: run(target, config, "float32", enforce_eager=eager)[1]["vllm:spec_decode_num_accepted_tokens"]
        for eager in (False, True)
    }
    assert accepted[False] == accepted[True]


@pytest.mark.parametrize("head", HEADS)
def test_fused_is_by_layers_but_for_rounding(target, heads, head, monkeypatch):
    """Both draft for the same text: almost all of what the one has accepted the other has, too."""
    config = {"model": str(heads[head]), "num_speculative_tokens": 3}
    made = []
    create = EagleHead.__init__

    def note(self, *args, **kwargs):
        create(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(EagleHead, "__init__", note)
    accepted = []
    for switch in "10":
        monkeypatch.setenv(SWITCH, switch)
        values = run(target, config, "float32", enforce_eager=True)[1]
        accepted.append(values["vllm:spec_decode_num_accepted_tokens"])
    assert [head.fused for head in made] == [True, False]
    assert accepted[0] > 0 and abs(accepted[0] - accepted[1]) <= 0.1 * accepted[1]
