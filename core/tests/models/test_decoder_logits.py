"""The native decoder's logits equal transformers', however the tokens are cut into steps."""

from __future__ import annotations

import itertools

import pytest
import torch
from specdecode.testing.tiny import FAMILIES, tiny_checkpoint

TOLERANCE = 1e-4

#: name -> family, config overrides. Contexts of 100 tokens fit all of them.
VARIANTS = {
    **{family: (family, {}) for family in FAMILIES},
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama-head-dim": ("llama", {"head_dim": 24}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}),
    "llama-legacy-theta": ("llama", {"rope_theta": 100.0}),
    "mistral-window": ("mistral", {"sliding_window": 8}),
    "mixtral-window": ("mixtral", {"sliding_window": 8, "num_local_experts": 5, "num_experts_per_tok": 3}),
    "qwen3-moe-shares": ("qwen3-moe", {"norm_topk_prob": False, "attention_bias": True}),
    "qwen3-moe-some-dense": (
        "qwen3-moe",
        {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [1]},
    ),
    "qwen3-moe-window": ("qwen3-moe", {"use_sliding_window": True, "sliding_window": 8}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3-window": ("qwen3", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}),
    "qwen3-biases": ("qwen3", {"attention_bias": True}),
    "smollm3-window": ("smollm3", {"use_sliding_window": True, "sliding_window": 8}),
    "rope-linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0}},
    ),
    "rope-dynamic": (
        "llama",
        {
            "max_position_embeddings": 50,
            "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0},
        },
    ),
    "rope-llama3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "rope-yarn": (
        "qwen2",
        {
            "max_position_embeddings": 50,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 50,
            },
        },
    ),
    "rope-longrope": (
        "llama",
        {
            "max_position_embeddings": 200,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 100.0,
                "short_factor": [1.0] * 8,
                "long_factor": [1.0 + 0.5 * i for i in range(8)],
                "original_max_position_embeddings": 50,
            },
        },
    ),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    made = {}

    def get(variant):
        if variant not in made:
            family, overrides = VARIANTS[variant]
            path = tmp_path_factory.mktemp(variant)
            made[variant] = tiny_checkpoint(path, family, seed=len(made), **overrides)
        return made[variant]

    return get


def assert_logits(got, want):
    torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=0)


# The context is as long as max_model_len, so that types whose frequencies depend on the length agree.
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(variant, checkpoints, native, reference, prompt):
    path, ids = checkpoints(variant), prompt(100)
    want = reference(path)(ids).logits[0]
    assert want.std() > 0.5  # a flat reference would agree with anything

    whole = native(path, max_model_len=100).feed({"a": ids})[0]["a"]
    assert_logits(whole, want)

    chunked = native(path, max_model_len=100)
    cuts = [0, 1, 17, 33, 90, 92, *range(93, 101)]
    parts = [chunked.feed({"a": ids[i:j]})[0]["a"] for i, j in itertools.pairwise(cuts)]
    assert_logits(torch.cat(parts), want)


@pytest.mark.parametrize("variant", ["llama", "mistral-window", "qwen3", "qwen3-moe", "mixtral"])
def test_a_batch_of_rows_at_different_lengths(variant, checkpoints, native, reference, prompt):
    path = checkpoints(variant)
    texts = {
        name: prompt(length, seed=length) for name, length in [("a", 41), ("b", 9), ("c", 77), ("d", 30)]
    }
    run = reference(path)
    want = {name: run(ids).logits[0] for name, ids in texts.items()}
    paged = native(path)
    got = {name: [] for name in texts}
    done = dict.fromkeys(texts, 0)
    # Each row advances at its own pace: prefill chunks beside decode steps and chains.
    paces = {"a": [20, 1, 1, 19], "b": [9], "c": [70, 3, 2, 2], "d": [1] * 30}
    for step in range(30):
        feed = {}
        for name, pace in paces.items():
            if step < len(pace):
                feed[name] = texts[name][done[name] : done[name] + pace[step]]
                done[name] += pace[step]
        for name, logits in paged.feed(feed)[0].items():
            got[name].append(logits)
    for name, ids in texts.items():
        assert len(torch.cat(got[name])) == len(ids)
        assert_logits(torch.cat(got[name]), want[name])


@pytest.mark.parametrize("variant", ["llama", "qwen2", "mistral-window", "qwen2-window"])
def test_each_node_of_a_tree_sees_its_own_path(variant, checkpoints, native, reference, prompt):
    path, ids = checkpoints(variant), prompt(21)
    nodes, parents = prompt(8, seed=9), (-1, -1, 0, 0, 1, 3, 5, 4)
    run = reference(path)
    paged = native(path)
    paged.feed({"a": ids[:20], "b": prompt(6, seed=1)})
    logits, _ = paged.feed({"a": ids[20:], "b": prompt(2, seed=2)}, trees={"a": (nodes, parents)})
    assert_logits(logits["a"][0], run(ids).logits[0, -1])
    for node in range(len(nodes)):
        text, at = [], node
        while at >= 0:
            text, at = [nodes[at], *text], parents[at]
        assert_logits(logits["a"][1 + node], run(ids + text).logits[0, -1])


def test_rejected_drafts_leave_no_trace(checkpoints, native, reference, prompt):
    path, ids = checkpoints("llama"), prompt(30)
    paged = native(path)
    paged.feed({"a": ids[:12]})
    paged.feed({"a": prompt(5, seed=3)})
    paged.lengths["a"] = 12
    assert_logits(paged.feed({"a": ids[12:]})[0]["a"], reference(path)(ids).logits[0, 12:])


def test_taps_are_the_residual_stream(checkpoints, native, reference, prompt):
    path, ids = checkpoints("llama"), prompt(10)
    want = reference(path)(ids)
    paged = native(path)
    _, tapped = paged.feed({"a": ids}, taps=(2, 0, 1))
    torch.testing.assert_close(paged.decoder.norm(tapped[1]), tapped[0])
    hidden, _, first, middle = (stream.cpu() for stream in tapped)
    torch.testing.assert_close(first, want.hidden_states[0][0], atol=1e-6, rtol=0)
    torch.testing.assert_close(middle, want.hidden_states[1][0], atol=1e-6, rtol=0)
    # transformers gives the last one after the final norm.
    torch.testing.assert_close(hidden, want.hidden_states[2][0], atol=1e-4, rtol=0)


def test_frequencies_within_the_trained_length_are_unscaled(checkpoints, native, reference, prompt):
    for variant in ("rope-dynamic", "rope-longrope"):
        path, ids = checkpoints(variant), prompt(40)
        assert_logits(native(path, max_model_len=50).feed({"a": ids})[0]["a"], reference(path)(ids).logits[0])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.15), (torch.float16, 0.02)])
@pytest.mark.parametrize("variant", ["llama", "qwen3", "smollm"])
def test_low_precision_stays_near_float32(variant, dtype, tolerance, checkpoints, native, reference, prompt):
    path, ids = checkpoints(variant), prompt(50)
    want = reference(path)(ids).logits[0]
    paged = native(path, dtype=dtype)
    got = torch.cat(
        [paged.feed({"a": ids[:47]})[0]["a"], *(paged.feed({"a": [i]})[0]["a"] for i in ids[47:])]
    )
    torch.testing.assert_close(got, want, atol=tolerance, rtol=0)
    assert (got.argmax(-1) == want.argmax(-1)).float().mean() > 0.9


def test_positions_may_run_past_the_context_while_drafting(checkpoints, native):
    paged = native(checkpoints("llama"), max_model_len=20)
    cos, _ = paged.decoder.rotary(torch.tensor([19, 20, 300], device=paged.device))
    assert cos.shape == (3, 8)
    assert cos.isfinite().all()
