"""Models of transformers on our paged KV give transformers' own logits, and what cannot be run is refused."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from specdecode import LLM, SamplingParams, TokensPrompt
from specdecode.contract import ConfigError
from specdecode.models import TransformersDecoder, describe_target, load_model, resolve_model, weight_bytes
from specdecode.testing.foreign import foreign_checkpoint, foreign_config

TOLERANCE = 1e-4
CPU = torch.device("cpu")
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
#: Values of another size than keys.
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
}

#: name -> model type, and fields of its config.
MODELS = {
    "gpt2": ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}),
    "gpt2-scaled-by-layer": (
        "gpt2",
        {
            "n_embd": 64,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": 128,
            "scale_attn_by_inverse_layer_idx": True,
        },
    ),
    "opt": (
        "opt",
        {k: v for k, v in SHAPE.items() if k not in ("intermediate_size", "num_key_value_heads")}
        | {"ffn_dim": 128, "word_embed_proj_dim": 64},
    ),
    "gemma": ("gemma", SHAPE | {"head_dim": 32, "num_key_value_heads": 1}),
    "gemma2-final-cap": (
        "gemma2",
        SHAPE | SLIDING | {"head_dim": 16, "attn_logit_softcapping": None, "final_logit_softcapping": 2.0},
    ),
    "gemma3": ("gemma3_text", SHAPE | SLIDING | {"head_dim": 32}),
    "phi": ("phi", SHAPE | {"partial_rotary_factor": 0.5}),
    "phi3-window": ("phi3", SHAPE | {"sliding_window": 8}),
    "cohere": ("cohere", SHAPE | {"logit_scale": 0.5}),
    "gpt_neox": ("gpt_neox", {k: v for k, v in SHAPE.items() if k != "num_key_value_heads"}),
    "olmoe": ("olmoe", SHAPE | {"num_experts": 4, "num_experts_per_tok": 2}),
    "glm4_moe": ("glm4_moe", SHAPE | EXPERTS | {"head_dim": 32, "use_qk_norm": True}),
    "deepseek_v3": ("deepseek_v3", SHAPE | EXPERTS | LATENT),
}

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    made = {}

    def get(name):
        if name not in made:
            made[name] = foreign_checkpoint(tmp_path_factory.mktemp(name), *MODELS[name], seed=len(made))
        return made[name]

    return get


def assert_logits(got, want):
    torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(name, checkpoints, native, reference, prompt):
    path, ids = checkpoints(name), prompt(60)
    want = reference(path)(ids).logits[0]
    assert want.std() > 0.2  # a flat reference would agree with anything
    whole = native(path, max_model_len=128)
    assert isinstance(whole.decoder, TransformersDecoder)
    assert_logits(whole.feed({"a": ids})[0]["a"], want)

    chunked = native(path, max_model_len=128)
    cuts = [0, 1, 17, 33, 52, *range(53, 61)]
    parts = [chunked.feed({"a": ids[i:j]})[0]["a"] for i, j in itertools.pairwise(cuts)]
    assert_logits(torch.cat(parts), want)


@pytest.mark.parametrize("name", ["gpt2", "opt", "gemma", "gemma3", "phi"])
def test_rows_of_a_batch_do_not_see_each_other(name, checkpoints, native, reference, prompt):
    path = checkpoints(name)
    texts = {row: prompt(length, seed=length) for row, length in [("a", 31), ("b", 9), ("c", 40)]}
    paged, run = native(path), reference(path)
    first = paged.feed({row: ids[: 3 * len(ids) // 4] for row, ids in texts.items()})[0]
    rest = paged.feed({row: ids[3 * len(ids) // 4 :] for row, ids in texts.items()})[0]
    for row, ids in texts.items():
        assert_logits(torch.cat([first[row], rest[row]]), run(ids).logits[0])


@pytest.mark.parametrize("name", ["gpt2", "gemma3", "phi"])
def test_each_node_of_a_tree_sees_its_own_path(name, checkpoints, native, reference, prompt):
    path, ids = checkpoints(name), prompt(21)
    nodes, parents = prompt(5, seed=9), (-1, -1, 0, 0, 2)
    paged, run = native(path), reference(path)
    paged.feed({"a": ids[:20]})
    logits, _ = paged.feed({"a": ids[20:]}, trees={"a": (nodes, parents)})
    for node in range(len(nodes)):
        text, at = [], node
        while at >= 0:
            text, at = [nodes[at], *text], parents[at]
        assert_logits(logits["a"][1 + node], run(ids + text).logits[0, -1])


@pytest.mark.parametrize("name", ["gpt2", "opt", "phi"])
def test_taps_are_the_residual_stream(name, checkpoints, native, reference, prompt):
    path, ids = checkpoints(name), prompt(10)
    want = reference(path)(ids).hidden_states
    paged = native(path)
    _, (hidden, last, first, middle) = paged.feed({"a": ids}, taps=(2, 0, 1))
    for got, expected in ((first, want[0]), (middle, want[1]), (hidden, want[2])):
        torch.testing.assert_close(got.cpu(), expected[0], atol=1e-4, rtol=0)
    assert not torch.allclose(last, hidden)  # transformers gives the last one after the final norm


def test_the_embedding_is_what_enters_the_first_block(checkpoints, native, prompt):
    paged, ids = native(checkpoints("gemma")), prompt(10)
    _, (_, entering) = paged.feed({"a": ids}, taps=(0,))
    embedded = paged.decoder.embed_tokens(torch.tensor(ids, device=paged.device))
    torch.testing.assert_close(embedded, entering)


def test_positions_may_run_past_the_context_while_drafting(checkpoints, native, reference, prompt):
    path, ids = checkpoints("gpt2"), prompt(127)
    paged = native(path, max_model_len=128)
    paged.feed({"a": ids[:126]})
    logits, _ = paged.feed({"a": ids[126:]}, trees={"a": ([5, 6, 7], (-1, 0, 1))})
    assert_logits(logits["a"][:2], reference(path)([*ids, 5]).logits[0, -2:])
    assert logits["a"].isfinite().all()


def test_the_shape_is_learned_without_weights(tmp_path):
    foreign_config(tmp_path, *MODELS["gemma"])
    info = describe_target(resolve_model(tmp_path), dtype=torch.float32, device=CPU, max_model_len=64)
    assert (info.num_layers, info.num_heads, info.num_kv_heads, info.head_dim) == (2, 4, 1, 32)
    assert (info.vocab_size, info.hidden_size, info.architecture) == (300, 64, "GemmaForCausalLM")


def test_weights_are_counted_once_and_dummy_ones_are_seeded(tmp_path):
    foreign_config(tmp_path, *MODELS["gpt2"])
    models = [
        load_model(
            resolve_model(tmp_path), dtype=torch.bfloat16, device=CPU, max_model_len=64, load_format="dummy"
        )
        for _ in range(2)
    ]
    assert weight_bytes(models[0]) == 2 * sum(p.numel() for p in models[0].model.parameters())
    assert models[0].model.transformer.wte.weight is models[0].model.lm_head.weight
    for left, right in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert left.dtype is torch.bfloat16
        assert torch.equal(left, right)


@pytest.mark.parametrize("name", ["gpt2", "opt", "gemma", "phi"])
def test_greedy_texts_equal_generate_with_and_without_drafts(name, checkpoints, prompt):
    from transformers import AutoModelForCausalLM

    path = checkpoints(name)
    phrase = prompt(6, seed=4)
    prompts = [prompt(11), phrase * 3, prompt(30, seed=2)]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    want = []
    for ids in prompts:
        given = torch.tensor([ids])
        text = model.generate(
            given,
            attention_mask=torch.ones_like(given),
            do_sample=False,
            min_new_tokens=24,
            max_new_tokens=24,
        )
        want.append(text[0, len(ids) :].tolist())
    for method in (None, NGRAM):
        llm = LLM(
            path,
            dtype="float32",
            device="cpu",
            max_model_len=100,
            max_num_batched_tokens=16,
            max_num_seqs=3,
            speculative_config=method,
        )
        params = GREEDY.clone(ignore_eos=False, min_tokens=24)  # as min_new_tokens, it forbids eos
        outputs = llm.generate([TokensPrompt(prompt_token_ids=ids) for ids in prompts], params)
        counts = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
        llm.shutdown()
        if method:
            accepted = counts["vllm:spec_decode_num_accepted_tokens"]
            assert accepted > 0
        assert [list(output.outputs[0].token_ids) for output in outputs] == want


def test_bfloat16_on_a_cpu_needs_no_exactness(checkpoints):
    llm = LLM(checkpoints("gpt2"), dtype="bfloat16", device="cpu", max_model_len=64, speculative_config=NGRAM)
    assert len(llm.generate("abc abc abc", GREEDY)[0].outputs[0].token_ids) == 24
    llm.shutdown()


def refusal(path, **keywords):
    with pytest.raises(ConfigError) as caught:
        LLM(path, device="cpu", **({"load_format": "dummy", "skip_tokenizer_init": True} | keywords))
    return str(caught.value)


MAMBA = {"hidden_size": 64, "num_hidden_layers": 2, "state_size": 4}


@pytest.mark.parametrize(
    ("model_type", "fields", "needles"),
    [
        ("mamba", MAMBA, ["MambaForCausalLM", "recurrent state", "rolled back"]),
        ("rwkv", {"hidden_size": 64, "num_hidden_layers": 2}, ["RwkvForCausalLM", "recurrent state"]),
        ("qwen3_next", SHAPE, ["Qwen3NextForCausalLM", "recurrent state"]),
        (
            "bloom",
            {"hidden_size": 64, "n_layer": 2, "n_head": 4},
            ["BloomForCausalLM", "attention interface"],
        ),
        ("gemma2", SHAPE | {"head_dim": 16}, ["soft-capped attention scores", "softcap"]),
        (
            "gpt_oss",
            SHAPE | {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
            ["attention sinks", "s_aux"],
        ),
        ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "add_cross_attention": True}, ["encoder"]),
        ("phimoe", SHAPE | {"sliding_window": 8, "num_local_experts": 4}, ["pass its sliding window on"]),
        ("gemma4_text", SHAPE | SLIDING | {"head_dim": 16, "global_head_dim": 32}, ["KV heads differ"]),
        ("llama4_text", SHAPE | {"num_local_experts": 4}, ["chunked_attention"]),
    ],
)
def test_what_cannot_be_run_is_refused(tmp_path, model_type, fields, needles):
    foreign_config(tmp_path, model_type, fields)
    for method in (None, NGRAM):
        said = refusal(tmp_path, speculative_config=method)
        for needle in needles:
            assert needle in said


def test_a_rope_that_grows_is_refused_beyond_its_trained_length(tmp_path):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}
    foreign_config(tmp_path, "phi", SHAPE | {"rope_parameters": rope | {"partial_rotary_factor": 0.5}})
    assert "max_model_len=128" in refusal(tmp_path, max_model_len=200)


@pytest.mark.parametrize(("field", "value"), [("quantization", "int8"), ("exact", True)])
def test_options_of_the_native_decoder_are_refused(tmp_path, field, value):
    foreign_config(tmp_path, *MODELS["gpt2"])
    said = refusal(tmp_path, **{field: value})
    assert field in said and "GPT2LMHeadModel" in said and "LlamaForCausalLM" in said


def test_a_checkpoint_that_lacks_tensors(checkpoints, tmp_path):
    from safetensors.torch import load_file, save_file

    source = checkpoints("phi")
    tensors = load_file(source / "model.safetensors")
    tensors.pop("model.layers.1.mlp.fc1.weight")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    assert "model.layers.1.mlp.fc1.weight" in refusal(tmp_path, load_format="auto")


def test_an_architecture_of_another_model_type(checkpoints, tmp_path):
    config = json.loads((checkpoints("phi") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["GPT2LMHeadModel"]}))
    said = refusal(tmp_path)
    assert "GPT2LMHeadModel" in said and "'phi'" in said
