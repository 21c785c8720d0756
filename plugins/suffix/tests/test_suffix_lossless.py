"""In the engine: speculation changes no output, whatever is remembered, and memory stays in its namespace."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest
from specdecode import LLM, SamplingParams
from specdecode.contract import ConfigError
from specdecode.testing.invariants import check_core
from specdecode.testing.tiny import favour, table_checkpoint, tiny_checkpoint

SHAPES = {
    "chain": {"backend": "python"},
    "tree": {
        "backend": "python",
        "suffix_decoding_use_tree_spec": True,
        "suffix_decoding_max_spec_factor": 3.0,
        "num_speculative_tokens": 12,
    },
}
if find_spec("arctic_inference"):
    SHAPES["arctic-tree"] = SHAPES["tree"] | {"backend": "arctic"}
in_both_orders = pytest.mark.parametrize("order", ["plain", "late"])
every_shape = pytest.mark.parametrize("shape", SHAPES)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """Its next token follows from the last ones: outputs repeat each other and themselves."""
    path = tmp_path_factory.mktemp("suffix") / "target"
    return tiny_checkpoint(path, output_scale=0.2, max_position_embeddings=256)


def requests(count=8):
    rng = np.random.default_rng(0)
    kinds = [
        {"temperature": 0},
        {"temperature": 0.9, "top_p": 0.9, "seed": 5},
        {"temperature": 0.3, "seed": 6},
        {"temperature": 0, "presence_penalty": 0.6},
        {"temperature": 0.7, "top_k": 3, "seed": 2**40},
        {"temperature": 0, "min_tokens": 9},
        {"temperature": 0.4, "seed": 7, "repetition_penalty": 1.1},
        {"temperature": 0.5, "min_p": 0.05, "seed": -7},
    ]
    prompts = [rng.integers(3, 300, 3 + 5 * index).tolist() for index in range(count)]
    return prompts, [SamplingParams(max_tokens=30 + 2 * i, **kinds[i % 8]) for i in range(count)]


class Engine:
    """An engine whose outputs are ids; nothing may be left behind in it."""

    def __init__(self, target, keys=None, order="plain", **options):
        config = None if keys is None else {"method": "suffix", **keys}
        defaults = {
            "dtype": "float32",
            "device": "cpu",
            "block_size": 4,
            "num_gpu_blocks_override": 300,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 256,
            "max_model_len": 96,
            "skip_tokenizer_init": True,
        }
        late = order == "late"
        self.llm = LLM(str(target), speculative_config=config, async_scheduling=late, **(defaults | options))

    def __call__(self, prompts, params, salt=None):
        named = {} if salt is None else {"cache_salt": salt}
        inputs = [{"prompt_token_ids": prompt, **named} for prompt in prompts]
        outputs = self.llm.generate(inputs, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def metric(self, name):
        return {metric.name: metric.value for metric in self.llm.get_metrics()}.get(name, 0)

    @property
    def accepted(self):
        return self.metric("vllm:spec_decode_num_accepted_tokens")


@pytest.fixture(scope="module")
def plain(target):
    return Engine(target)(*requests())


@in_both_orders
@every_shape
def test_at_batch_8_and_1_cold_and_remembered(target, plain, shape, order):
    engine, (prompts, params) = Engine(target, SHAPES[shape], order), requests()
    assert engine(prompts, params) == plain
    cold = engine.accepted
    assert engine(prompts, params) == plain
    assert engine.accepted - cold > cold > 0  # the same outputs again are known
    for index in (0, 2, 7):
        assert engine(prompts[index : index + 1], params[index : index + 1]) == plain[index : index + 1]
    assert engine.metric("specdecode:drafts_dropped_by_fault") == 0
    assert engine.metric("specdecode:proposer_failures") == 0
    check_core(engine.llm.llm_engine.core)


@in_both_orders
@every_shape
@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 16, "max_num_seqs": 4},
        {"num_gpu_blocks_override": 30},
        {"enable_prefix_caching": False},
    ],
    ids=["chunked", "preempted", "uncached"],
)
def test_chunked_preempted_and_uncached(target, plain, shape, options, order):
    engine = Engine(target, SHAPES[shape], order, **options)
    for _ in range(2):
        assert engine(*requests()) == plain
    assert engine.accepted > 0
    if "num_gpu_blocks_override" in options:
        assert engine.metric("vllm:num_preemptions") > 0
    # Every output is remembered whole, whatever became of its request in between.
    assert engine.metric("suffix.cached_tokens") == 2 * sum(map(len, plain))
    check_core(engine.llm.llm_engine.core)


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_rules_that_weigh_probabilities_keep_greedy_outputs_and_seeds(target, plain, rule):
    outputs = []
    for _ in range(2):
        engine, (prompts, params) = (
            Engine(target, {**SHAPES["chain"], "rejection_sample_method": rule}),
            requests(),
        )
        outputs.append(engine(prompts, params))
    greedy = [index for index, p in enumerate(params) if p.temperature == 0]
    assert [outputs[0][i] for i in greedy] == [plain[i] for i in greedy]
    assert outputs[0] == outputs[1]


def test_after_a_spell_without_drafts(target, plain):
    """With 3 requests and more nothing is drafted, but all is learnt."""
    engine = Engine(target, {**SHAPES["chain"], "disable_by_batch_size": 3})
    assert engine(*requests()) == plain
    assert engine.metric("suffix.cached_tokens") == sum(map(len, plain))
    assert engine.metric("vllm:spec_decode_num_drafts") > 0


@every_shape
def test_memory_stays_in_its_namespace_unless_it_is_shared(target, shape):
    prompts, params = requests()
    prompts, params = prompts[:1], [SamplingParams(temperature=0.8, seed=3, max_tokens=40)]

    def drafted(keys, salts):
        """Accepted drafts of the same request in each namespace, one after the other."""
        engine, accepted = Engine(target, {**SHAPES[shape], **keys}, enable_prefix_caching=False), []
        for salt in salts:
            before = engine.accepted
            engine(prompts, params, salt)
            accepted.append(engine.accepted - before)
        return accepted, engine.metric("suffix.cached_namespaces")

    (cold, alien, own), spaces = drafted({}, ["alice", "bob", "alice"])
    assert cold == alien < own and spaces == 2
    (cold, unsalted), _ = drafted({}, ["alice", None])
    assert cold == unsalted
    (cold, shared), spaces = drafted({"suffix_decoding_share_namespaces": True}, ["alice", "bob"])
    assert cold < shared and spaces == 1


def test_eviction_is_counted_and_bounds_hold(target):
    rng = np.random.default_rng(1)
    keys = {"backend": "python", "suffix_decoding_max_cached_requests": 5}
    engine, plain = Engine(target, keys), Engine(target)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    for _ in range(4):
        prompts = [rng.integers(3, 300, 6).tolist() for _ in range(10)]
        assert engine(prompts, params) == plain(prompts, params)
        assert engine.metric("suffix.cached_requests") <= 5
    assert engine.metric("suffix.evicted_requests") == 35
    assert engine.metric("suffix.evicted_tokens") == 35 * 12
    assert engine.metric("suffix.cached_tokens") == 5 * 12


def test_outputs_are_remembered_from_one_engine_to_the_next(target, tmp_path):
    path = tmp_path / "outputs.npz"
    keys = {**SHAPES["chain"], "suffix_decoding_cache_path": str(path)}
    prompts, params = requests()
    first = Engine(target, keys)
    outputs, cold = first(prompts, params), first.accepted
    first.llm.shutdown()
    second = Engine(target, keys)
    assert second(prompts, params) == outputs
    assert second.accepted > cold
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ConfigError, match=r"speculative_config\.suffix_decoding_cache_path"):
        Engine(target, keys)


# -- faults of docs/faults, with suffix -------------------------------------------------------------
ALPHABET = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMN"
LETTERS = [3 + byte for byte in ALPHABET]  # ids of a tiny checkpoint are byte + 3
TEXT = ALPHABET.decode()
K = 16


@pytest.fixture(scope="module")
def loop(tmp_path_factory):
    """Greedy output goes round the alphabet."""
    law = favour(dict(zip(LETTERS, [*LETTERS[1:], LETTERS[0]], strict=True)))
    return table_checkpoint(tmp_path_factory.mktemp("suffix") / "loop", law)


def ask(llm, asks):
    prompts = [{"prompt_token_ids": LETTERS * 2}] * len(asks)
    params = [
        SamplingParams(**({"temperature": 0, "max_tokens": 2 * K + 6, "logprobs": 1} | each)) for each in asks
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [
        (o.text, [*o.token_ids], o.finish_reason, o.stop_reason, len(o.logprobs), [*o.token_sources])
        for (o,) in (output.outputs for output in outputs)
    ]


@in_both_orders
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_h02_stop_strings_inside_accepted_blocks(loop, shape, order):
    """At each offset and across blocks, cut and kept, two of them, long ones, and those of the prompt."""
    asks = [
        {"stop": [TEXT[place : place + 2]], "include_stop_str_in_output": kept}
        for place in range(K + 3)
        for kept in (False, True)
    ]
    asks += [
        {"stop": ["ij", "cd"]},
        {"stop": ["cde", "de"]},
        {"stop": [TEXT[2 : K + 6]]},
        {"stop": [TEXT[30:32]], "max_tokens": 20},
        {"stop": [TEXT[-1] + TEXT[0]], "max_tokens": 20},
        {"stop": ["fg"], "min_tokens": 8},
        {"stop": []},
    ]
    keys = SHAPES[shape] | {"num_speculative_tokens": K, "suffix_decoding_max_tree_depth": 40}
    options = {
        "skip_tokenizer_init": False,
        "max_model_len": 160,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
        "num_gpu_blocks_override": 1200,
    }
    got = ask(Engine(loop, keys, order, **options).llm, asks)
    want = ask(Engine(loop, **options).llm, asks)
    assert [each[:-1] for each in got] == [each[:-1] for each in want]
    assert all(len(each[1]) == each[4] == len(each[5]) for each in got)
    assert max(each[5][1 : K + 1].count("draft") for each in got) == K  # whole blocks were accepted


@pytest.mark.parametrize("length", [20, 29, 31])
def test_h13_the_end_of_the_context(target, length):
    prompts = [([7, 8, 9, 10] * 10)[:length]]
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    outputs = [
        Engine(target, keys, max_model_len=32)(prompts, params)
        for keys in (None, SHAPES["chain"], SHAPES["tree"])
    ]
    assert outputs[0] == outputs[1] == outputs[2] and len(outputs[0][0]) == 32 - length


@pytest.mark.parametrize("prompt", [[5], [5, 5], [5] * 40, [5, 6]])
def test_h16_odd_prompts(target, prompt):
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    assert Engine(target, SHAPES["chain"])([prompt], params) == Engine(target)([prompt], params)
