"""Models of transformers in CUDA graphs: transformers' own tokens, or a line on why there are no graphs."""

from __future__ import annotations

import logging

import pytest
import torch
from specdecode import LLM, SamplingParams
from specdecode.testing import scripted
from specdecode.testing.foreign import foreign_checkpoint

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
scripted.install()

NEW = 24
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
GROWING = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}
#: name -> model type, and fields of its config.
MODELS = {
    "gpt2": ("gpt2", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128}),
    "gpt_neox": ("gpt_neox", {k: v for k, v in SHAPE.items() if k != "num_key_value_heads"}),
    "starcoder2": ("starcoder2", SHAPE),
    "granite": ("granite", SHAPE | {"logits_scaling": 0.5}),
    "olmo2": ("olmo2", SHAPE),
    "phi": ("phi", SHAPE | {"partial_rotary_factor": 0.5}),
    "phi-growing": ("phi", SHAPE | {"rope_parameters": GROWING}),
    "cohere": ("cohere", SHAPE | {"logit_scale": 0.5}),
    "gemma3": ("gemma3_text", SHAPE | {"head_dim": 32, "sliding_window": 8, "layer_types": SLIDING}),
}
METHODS = {
    "none": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 3},
    "taps": {"method": "scripted-eagle", "num_speculative_tokens": 3},
    "draft-model": {"method": "scripted-self-draft", "num_speculative_tokens": 3},
}
KINDS = ({"temperature": 0}, {"temperature": 0.9, "seed": 5, "top_p": 0.9}, {"temperature": 1.0, "seed": 6})
PROMPTS = [[3 + (7 * i + j) % 40 for j in range(4 + 9 * i)] for i in range(5)]


@pytest.fixture(autouse=True)
def captured_steps(monkeypatch):
    """Graphs: checking each step's writes, as other tests of a run may ask for, would forbid them."""
    monkeypatch.delenv("SPECDECODE_CHECK_WRITES", raising=False)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    made = {}

    def get(name, fields=None):
        if name not in made:
            made[name] = foreign_checkpoint(tmp_path_factory.mktemp(name), *(fields or MODELS[name]))
        return made[name]

    return get


def run(path, config=None, *, kinds=KINDS, **options):
    """Ids of each request, and whether steps were captured."""
    params = [
        SamplingParams(max_tokens=NEW, ignore_eos=True, **kinds[i % len(kinds)]) for i in range(len(PROMPTS))
    ]
    with LLM(
        path,
        dtype="float32",
        device="cuda",
        max_model_len=96,
        num_gpu_blocks_override=200,
        max_num_seqs=8,
        skip_tokenizer_init=True,
        speculative_config=config,
        **options,
    ) as llm:
        outputs = llm.generate([{"prompt_token_ids": own} for own in PROMPTS], params, use_tqdm=False)
        steady = getattr(llm.llm_engine.core, "steady", None)  # the plain loop has none
        captured = steady is not None and steady.captured
        values = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    assert not values.get("specdecode:proposer_failures")
    return [list(out.outputs[0].token_ids) for out in outputs], captured


def generated(path):
    """The texts of transformers' ``generate``, greedy."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval().to("cuda")
    model.generation_config.eos_token_id = None
    texts = []
    for ids in PROMPTS:
        given = torch.tensor([ids], device="cuda")
        text = model.generate(
            given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=NEW
        )
        texts.append(text[0, len(ids) :].tolist())
    return texts


@pytest.mark.parametrize("name", MODELS)
def test_graphs_give_the_tokens_of_generate(name, checkpoints):
    path = checkpoints(name)
    ids, captured = run(path, METHODS["ngram"], kinds=KINDS[:1])
    assert captured
    assert ids == generated(path)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["gpt_neox", "olmo2", "gemma3"])
def test_graphs_change_no_token(name, method, checkpoints):
    path = checkpoints(name)
    ids, captured = run(path, METHODS[method])
    assert captured
    eager, not_captured = run(path, METHODS[method], enforce_eager=True)
    assert not not_captured and ids == eager
    assert ids == run(path, enforce_eager=True, async_scheduling=False)[0]


def test_a_mixture_of_experts_is_what_trying_shows(checkpoints):
    """Whether transformers' experts look at how tokens are spread depends on its version and the dtype."""
    path = checkpoints("olmoe", ("olmoe", SHAPE | {"num_experts": 4, "num_experts_per_tok": 2}))
    assert run(path, METHODS["ngram"])[0] == run(path, METHODS["ngram"], enforce_eager=True)[0]


def reads(x):
    assert x.sum().item() == x.sum().item()


def waits(x):
    torch.cuda.synchronize()  # which torch's watch over synchronisations does not see: the capture fails


@pytest.mark.parametrize("look", [reads, waits])
@pytest.mark.parametrize("fewest", [1, 32], ids=["always", "in-the-largest-steps"])
def test_what_looks_at_the_host_runs_without_graphs(look, fewest, checkpoints, monkeypatch, caplog):
    path = checkpoints("phi")
    want, captured = run(path, METHODS["ngram"])
    assert captured
    forward = torch.nn.Linear.forward

    def looking(self, x):
        if x.shape[-2] >= fewest and x.is_cuda:  # shapes alone are looked at without a device first
            look(x)
        return forward(self, x)

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(torch.nn.Linear, "forward", looking)
        ids, captured = run(path, METHODS["ngram"])
    assert not captured and ids == want
    said = [record.getMessage() for record in caplog.records if "cannot be captured" in record.getMessage()]
    assert len(said) == 1 and "PhiForCausalLM" in said[0]
    assert ("x.sum().item()" if look is reads else "torch.cuda.synchronize()") in said[0]
    again, captured = run(path, METHODS["ngram"])  # nothing is left that would keep another engine from it
    assert captured and again == want
