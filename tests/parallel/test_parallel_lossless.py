"""One model on several ranks gives what it gives on one: greedy and seeded, by each method, in float32."""

from __future__ import annotations

import pytest
from specdec_eagle.testing import write_head
from specdec_medusa.testing import write_heads
from specdec_mlp.testing import write_speculator
from specdec_mtp.testing import write_target
from specdecode import SamplingParams
from specdecode.contract import ConfigError, Needs, Unsupported
from specdecode.distributed.proposers import check_ranks
from specdecode.models.quantized import QuantizedLoader, loading
from specdecode.testing.adapters import AdapterLab
from specdecode.testing.divergence import explain_divergence
from specdecode.testing.invariants import check_core
from specdecode.testing.lossless import Engine, requests
from specdecode.testing.quantized import quantized_checkpoint
from specdecode.testing.ranks import ranks_in_threads
from specdecode.testing.tiny import tiny_checkpoint
from transformers import GPTNeoXConfig

FOUR = {"num_speculative_tokens": 4}
TREE = "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 0, 0)]"


@pytest.fixture(autouse=True)
def ranks():
    with ranks_in_threads() as started:
        yield started


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("parallel")


@pytest.fixture(scope="module")
def target(folder):
    return tiny_checkpoint(folder / "target", output_scale=0.2, num_hidden_layers=4)


@pytest.fixture(scope="module")
def one(target):
    """The target on one rank."""
    return Engine(target)


@pytest.fixture(scope="module")
def plain(one):
    return one(*requests(5))


@pytest.fixture(scope="module")
def checkpoints(folder, target):
    return {
        "draft": tiny_checkpoint(folder / "draft", output_scale=0.2, num_hidden_layers=1),
        "eagle3": write_head(folder / "eagle3", "eagle3", target),
        "eagle": write_head(folder / "eagle", "eagle", target),
        "medusa": write_heads(folder / "medusa", "medusa-1", target, fit=False),
        "mlp": write_speculator(folder / "mlp", target, fit=False),
    }


def same(one, outputs, expected, prompts, params):
    """Equal, or parted where rounding may part: sums of ranks are made in another order than those of one."""
    for got, want, prompt, wish in zip(outputs, expected, prompts, params, strict=True):
        if got != want:
            divergence = explain_divergence(one.llm, prompt, want, got, wish)
            assert divergence is not None and divergence.kind == "tie", divergence
    assert sum(got == want for got, want in zip(outputs, expected, strict=True)) >= len(outputs) - 1


@pytest.mark.parametrize(("size", "order"), [(2, "plain"), (2, "late"), (4, "plain")])
def test_without_speculation(target, one, plain, size, order):
    """4 ranks on 2 KV heads: each head is held twice."""
    engine, (prompts, params) = Engine(target, order=order, tensor_parallel_size=size), requests(5)
    same(one, engine(prompts, params), plain, prompts, params)
    same(one, engine(prompts, params), plain, prompts, params)  # by the prefix cache
    check_core(engine.llm.llm_engine.core)
    engine.llm.shutdown()


METHODS = {
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3, **FOUR},
    "suffix": {"method": "suffix", **FOUR},
    "draft": {"method": "draft_model", **FOUR},
    "draft-shared": {"method": "draft_model", "draft_tensor_parallel_size": 2, **FOUR},
    "draft-standard": {"method": "draft_model", "rejection_sample_method": "standard", **FOUR},
    "eagle": {"method": "eagle", "speculative_token_tree": TREE},
    "eagle3": {"method": "eagle3", "aux_layer_ids": [1, 2, 3], **FOUR},
    "eagle3-tree": {
        "method": "eagle3",
        "aux_layer_ids": [1, 2, 3],
        "num_speculative_tokens": 8,
        "tree_top_k": 3,
        "tree_depth": 4,
    },
    "medusa": {"method": "medusa"},
    "mlp": {"method": "mlp_speculator"},
    "adaptive": {"method": "eagle3", "aux_layer_ids": [1, 2, 3], "adaptive": True, **FOUR},
}


def config(checkpoints, name):
    found = checkpoints.get(name.split("-")[0].replace("adaptive", "eagle3"))
    model = {} if found is None else {"model": str(found), "draft_tensor_parallel_size": 1}
    return model | METHODS[name]


@pytest.mark.parametrize("name", METHODS)
def test_every_method(target, one, plain, checkpoints, name, ranks):
    order = "late" if name in ("eagle3", "draft-shared", "adaptive") else "plain"
    engine, (prompts, params) = (
        Engine(target, config(checkpoints, name), order, tensor_parallel_size=2),
        requests(5),
    )
    outputs = engine(prompts, params)
    if name == "draft-standard":  # where drafts are weighed, they decide among draws of the same law
        outputs = outputs[::3]
        one = Engine(target, config(checkpoints, name))
        prompts, params, plain = prompts[::3], params[::3], one(prompts, params)[::3]
    same(one, outputs, plain, prompts, params)
    if name != "adaptive":  # which on a busy machine may find that no draft pays
        assert engine.metric("vllm:spec_decode_num_draft_tokens") > 0
    (threads,) = ranks
    follower = threads.caught_up(1)
    assert follower.trace() == engine.llm.llm_engine.trace()
    check_core(engine.llm.llm_engine.core)
    check_core(follower.core)
    engine.llm.shutdown()


def test_layers_of_the_target_itself(folder):
    path = write_target(folder / "mtp", "mimo", modules=1)
    prompts, params = requests(4)
    one = Engine(path)
    engine = Engine(path, {"method": "mtp", "num_speculative_tokens": 2}, tensor_parallel_size=2)
    same(one, engine(prompts, params), one(prompts, params), prompts, params)
    engine.llm.shutdown()


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen2", {"vocab_size": 301}),  # biases, and a vocabulary that does not divide
        ("qwen3", {"num_key_value_heads": 1}),
        ("smollm", {"vocab_size": 301}),  # tied
        ("llama", {"mlp_bias": True, "attention_bias": True}),
        ("qwen3-moe", {}),
        ("mixtral", {}),
    ],
)
@pytest.mark.parametrize("fused", ["0", "1"])
def test_families_by_layers_and_by_fused_products(folder, monkeypatch, family, changes, fused):
    monkeypatch.setenv("SPECDECODE_FUSED", fused)
    path = tiny_checkpoint(folder / f"{family}-{fused}", family, **changes)
    prompts, params = requests(4)
    one = Engine(path)
    expected = one(prompts, params)
    engine = Engine(path, tensor_parallel_size=2)
    same(one, engine(prompts, params), expected, prompts, params)
    engine.llm.shutdown()


@pytest.mark.parametrize("fused", ["0", "1"])
@pytest.mark.parametrize("layout", ["awq", "gptq", "fp8", "fp8-block", "compressed-int8-channel"])
def test_quantised_checkpoints(folder, monkeypatch, layout, fused):
    """Each rank keeps its part of what is stored; with a draft in the same layout."""
    monkeypatch.setenv("SPECDECODE_FUSED", fused)
    sizes = {"output_scale": 0.3, "hidden_size": 128, "intermediate_size": 256}
    path, _ = quantized_checkpoint(folder / f"{layout}-{fused}", layout, **sizes)
    draft = {"method": "draft_model", "model": str(path), "num_speculative_tokens": 3}
    prompts, params = requests(4)
    one = Engine(path)
    expected = one(prompts, params)
    held = one.llm.llm_engine.core.runner.model
    engine = Engine(path, draft, tensor_parallel_size=2)
    same(one, engine(prompts, params), expected, prompts, params)
    assert engine.accepted > 0
    own, whole = (model.layers[0].mlp.down_proj for model in (engine.llm.llm_engine.core.runner.model, held))
    assert own.packed == whole.packed and own.num_bytes < 0.6 * whole.num_bytes
    engine.llm.shutdown()


def test_quantised_layers_are_made_while_others_are_still_to_be_read(folder, monkeypatch):
    """A layer a turn: the same weights, and of the stored ones never more than one layer's."""
    path, _ = quantized_checkpoint(folder / "in turns", "awq", output_scale=0.3, num_hidden_layers=3)
    prompts, params = requests(3)
    expected = Engine(path)(prompts, params)
    made, allocated = QuantizedLoader._make_layer, QuantizedLoader._allocate
    held, most = set(), []

    def allocate(self, part, kind):
        held.add(part.name)
        most.append(len(held))
        return allocated(self, part, kind)

    def make(self, name, path):
        held.difference_update(part.name for part in self._layers[name])
        made(self, name, path)

    monkeypatch.setattr(loading, "_TURN_BYTES", 1)
    monkeypatch.setattr(QuantizedLoader, "_allocate", allocate)
    monkeypatch.setattr(QuantizedLoader, "_make_layer", make)
    assert Engine(path)(prompts, params) == expected
    assert max(most) == 3 and len(most) > 20  # queries, keys and values are of one layer


def test_quantised_weights_that_ranks_cannot_share(folder):
    """Groups that the cut would go through, and inputs in an order of their own."""
    path, _ = quantized_checkpoint(folder / "odd groups", "awq", intermediate_size=96)
    with pytest.raises(ConfigError, match=r"mlp.down_proj .* cannot be shared out .*groups of 32 inputs"):
        Engine(path, tensor_parallel_size=2)
    path, _ = quantized_checkpoint(folder / "ordered", "gptq-desc-act", intermediate_size=128)
    with pytest.raises(ConfigError, match=r"cannot be shared out .*desc_act"):
        Engine(path, tensor_parallel_size=2)


@pytest.mark.parametrize("fused", ["0", "1"])
@pytest.mark.parametrize(("size", "method"), [(2, "ngram"), (4, None)])
def test_adapters(folder, target, monkeypatch, size, method, fused):
    """Three and none in a batch, two of them at a time: each request as on one rank."""
    monkeypatch.setenv("SPECDECODE_FUSED", fused)
    lab = AdapterLab(folder / f"adapters-{size}-{fused}", target)
    prompts, params = lab.asks(max_tokens=16)
    speculation = METHODS[method] if method else None
    outputs = []
    for ranks in (1, size):
        with lab.engine(max_loras=2, speculative_config=speculation, tensor_parallel_size=ranks) as llm:
            outputs.append(lab.generate(llm, prompts, params))
            outputs.append(lab.generate(llm, prompts, params))
    assert outputs[0] == outputs[1] == outputs[2] == outputs[3]
    lab.close()


def test_a_mixture_of_experts_with_a_head_on_four_ranks(folder):
    path = tiny_checkpoint(folder / "mixture", "qwen3-moe", output_scale=0.3, num_hidden_layers=4)
    head = {"method": "eagle3", "model": str(write_head(folder / "its head", "eagle3", path)), **FOUR}
    prompts, params = requests(4)
    one = Engine(path)
    engine = Engine(path, head, "late", tensor_parallel_size=4)
    same(one, engine(prompts, params), one(prompts, params), prompts, params)
    assert engine.metric("vllm:spec_decode_num_draft_tokens") > 0
    engine.llm.shutdown()


def test_fused_with_a_head_that_reads_the_embedding(folder, target, checkpoints, one, plain, monkeypatch):
    monkeypatch.setenv("SPECDECODE_FUSED", "1")
    engine, (prompts, params) = (
        Engine(target, config(checkpoints, "eagle3"), "late", tensor_parallel_size=2),
        requests(5),
    )
    same(one, engine(prompts, params), plain, prompts, params)
    engine.llm.shutdown()


def test_chunked_prompts_and_preemption(target, one, checkpoints, ranks):
    prompts, params = requests(5)
    small = {"num_gpu_blocks_override": 26, "max_num_batched_tokens": 24}
    expected = one(prompts, params)
    engine = Engine(target, config(checkpoints, "eagle3"), tensor_parallel_size=2, **small)
    same(one, engine(prompts, params), expected, prompts, params)
    assert engine.metric("vllm:num_preemptions") > 0
    assert ranks[0].caught_up(1).core.scheduler.num_preemptions == engine.metric("vllm:num_preemptions")
    engine.llm.shutdown()


def test_aborted_requests_are_so_on_every_rank(target, ranks):
    engine = Engine(target, tensor_parallel_size=2).llm.llm_engine
    for name in "ab":
        engine.add_request(
            name, {"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=20, ignore_eos=True)
        )
    for _ in range(3):
        engine.step()
    engine.abort_request("a")
    while engine.has_unfinished_requests():
        engine.step()
    assert engine.reset_prefix_cache()
    follower = ranks[0].caught_up(1)
    assert follower.trace() == engine.trace()
    check_core(follower.core)
    engine.shutdown()


def test_each_rank_holds_its_share(target, ranks, monkeypatch):
    monkeypatch.setenv(
        "SPECDECODE_FUSED", "1"
    )  # weights as they are stored, without the padding of packed ones
    one, two = Engine(target), Engine(target, tensor_parallel_size=2)
    whole = one.llm.memory_plan()
    shares = [two.llm.memory_plan(), ranks[0].caught_up(1).memory]

    norms = (2 * 4 + 1) * 64 * 4
    assert sum(plan.weight_bytes - norms for plan in shares) == whole.weight_bytes - norms
    assert all(2 * plan.block_bytes == whole.block_bytes for plan in shares)
    two.llm.shutdown()


@pytest.mark.parametrize("speculation", [None, "eagle"])
def test_dummy_weights_are_those_of_one_rank_of_a_tied_model(folder, target, speculation):
    """EAGLE reads rows of the embedding, so that each rank has all of them, and the output layer some."""
    path = tiny_checkpoint(folder / "tied", "smollm", vocab_size=301)
    config = None
    if speculation:
        config = {"method": "eagle", "model": str(write_head(folder / "tied-head", "eagle", path)), **FOUR}
    prompts, params = requests(4)
    one = Engine(path, load_format="dummy")
    two = Engine(path, config, load_format="dummy", tensor_parallel_size=2)
    same(one, two(prompts, params), one(prompts, params), prompts, params)
    two.llm.shutdown()


def test_dummy_weights_are_those_of_one_rank(target):
    prompts, params = requests(4)
    one = Engine(target, load_format="dummy")
    two = Engine(target, load_format="dummy", tensor_parallel_size=2)
    same(one, two(prompts, params), one(prompts, params), prompts, params)
    two.llm.shutdown()


@pytest.mark.parametrize(
    ("changes", "size", "message"),
    [
        ({}, 3, "does not divide the model's num_attention_heads 4"),
        ({"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 96}, 3, "num_key_value_heads 2"),
        ({"intermediate_size": 129}, 2, "does not divide the model's intermediate_size 129"),
    ],
)
def test_models_that_cannot_be_shared_out(folder, changes, size, message):
    path = tiny_checkpoint(folder / f"odd-{size}-{len(changes)}-{message[-3:]}", **changes)
    with pytest.raises(ConfigError, match=message):
        Engine(path, tensor_parallel_size=size)


def test_models_that_others_run_are_refused(folder):
    foreign = folder / "foreign"
    GPTNeoXConfig(architectures=["GPTNeoXForCausalLM"], num_hidden_layers=1).save_pretrained(foreign)
    with pytest.raises(Unsupported, match="which transformers' code runs"):
        Engine(foreign, tensor_parallel_size=2, load_format="dummy", skip_tokenizer_init=True)


def test_methods_that_cannot_run_on_ranks_are_refused(target, checkpoints):
    heads = [{"method": "ngram", **FOUR}, config(checkpoints, "medusa")]
    with pytest.raises(Unsupported, match="goes by a clock"):
        Engine(target, {"method": "auto", "proposers": heads}, tensor_parallel_size=2)
    borrowing = Needs(width=1, depth=1, modules=frozenset({"lm_head"}))
    with pytest.raises(Unsupported, match="borrows lm_head of the target"):
        check_ranks(borrowing, "somebody's", 2)
    check_ranks(borrowing, "somebody's", 1)


def test_what_is_refused_at_the_door(target, checkpoints):
    with pytest.raises(ConfigError, match="first 2 devices"):
        Engine(target, tensor_parallel_size=2, device="cpu:0")
    with pytest.raises(ConfigError, match="distributed_executor_backend"):
        Engine(target, tensor_parallel_size=2, distributed_executor_backend="ray")
    shared = {"method": "draft_model", "model": str(checkpoints["draft"]), **FOUR}
    with pytest.raises(Unsupported, match="must be 1 or the target's 4, got 2"):
        Engine(target, shared | {"draft_tensor_parallel_size": 2}, tensor_parallel_size=4)
