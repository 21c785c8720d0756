"""Bad input: one clear error that names field, value and remedy, and everybody else untouched."""

from __future__ import annotations

import json

import pytest
from specdecode import LLM, EngineArgs, LLMEngine, SamplingParams, TokensPrompt
from specdecode.contract import ConfigError, SpecdecodeError
from specdecode.testing.tiny import tiny_checkpoint

GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(checkpoint):
    return LLM(checkpoint, dtype="float32", max_model_len=64, num_gpu_blocks_override=32)


def refused(call, *needles: str, kind: type[Exception] = ValueError) -> str:
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    for needle in needles:
        assert needle in message, f"{needle!r} is not in {message!r}"
    return message


@pytest.mark.parametrize(
    ("keywords", "needles"),
    [
        ({"max_model_length": 64}, ["max_model_length", "max_model_len"]),
        ({"dtype": "int3"}, ["LLM.dtype", "'int3'", "float32"]),
        ({"max_num_seqs": 0}, ["LLM.max_num_seqs", "at least 1", "0"]),
        ({"max_num_seqs": "8"}, ["LLM.max_num_seqs", "integer", "'8'"]),
        ({"block_size": True}, ["LLM.block_size", "integer", "True"]),
        ({"gpu_memory_utilization": 1.5}, ["LLM.gpu_memory_utilization", "1.5"]),
        ({"tensor_parallel_size": 0}, ["LLM.tensor_parallel_size", "at least 1"]),
        ({"tensor_parallel_size": 3}, ["tensor_parallel_size=3", "num_attention_heads"]),
        ({"quantization": "awq"}, ["quantization='awq'", "not quantized", "leave quantization out"]),
        ({"quantization": "bitsandbytes"}, ["LLM.quantization", "bitsandbytes"]),
        ({"max_loras": 2}, ["max_loras=2", "enable_lora=True"]),
        ({"enable_lora": True, "max_lora_rank": 0}, ["LLM.max_lora_rank", "0"]),
        (
            {"enable_lora": True, "max_loras": 4, "max_cpu_loras": 2},
            ["max_cpu_loras=2", "at least max_loras=4"],
        ),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 8}, ["max_num_batched_tokens=8", "max_num_seqs=64"]),
        ({"device": "quantum"}, ["device", "quantum"]),
        (
            {"max_model_len": 256, "num_gpu_blocks_override": 4},
            ["max_model_len=256", "64", "num_gpu_blocks_override"],
        ),
        ({"max_model_len": 10**7}, ["max_model_len", "10000000"]),
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 64},
            ["enable_chunked_prefill", "max_num_batched_tokens"],
        ),
    ],
)
def test_engine_arguments(checkpoint, keywords, needles):
    refused(lambda: LLM(checkpoint, **keywords), *needles)


def test_all_faults_of_one_call_come_together(checkpoint):
    message = refused(lambda: LLM(checkpoint, dtype="int3", max_num_seqs=0, sede=1))
    assert all(needle in message for needle in ("dtype", "max_num_seqs", "sede", "seed"))


@pytest.mark.parametrize("value", [0, -1, 10**6, "3", 2.5, True, None])
def test_num_speculative_tokens(checkpoint, value):
    config = {"method": "ngram", "num_speculative_tokens": value}
    refused(
        lambda: LLM(checkpoint, speculative_config=config),
        "speculative_config.num_speculative_tokens",
        repr(value),
        kind=ConfigError,
    )


def test_a_missing_count_is_named(checkpoint):
    refused(lambda: LLM(checkpoint, speculative_config={"method": "ngram"}), "num_speculative_tokens")


def test_unknown_method(checkpoint):
    refused(
        lambda: LLM(checkpoint, speculative_config={"method": "ngarm", "num_speculative_tokens": 3}),
        "ngarm",
        "ngram",
        kind=SpecdecodeError,
    )


def test_known_method_that_is_not_installed(checkpoint, monkeypatch):
    from specdecode.plugins.hints import known_methods

    monkeypatch.setitem(known_methods(), "acme", "specdec-acme")  # whatever is installed here
    refused(
        lambda: LLM(checkpoint, speculative_config={"method": "acme", "num_speculative_tokens": 3}),
        "acme",
        "pip install specdec-acme",
        kind=SpecdecodeError,
    )


def test_misspelt_method_field(checkpoint):
    refused(
        lambda: LLM(checkpoint, speculative_config=NGRAM | {"prompt_lookup_maxx": 4}),
        "prompt_lookup_maxx",
        "prompt_lookup_max",
    )


def test_a_rule_that_is_none(checkpoint):
    refused(
        lambda: LLM(checkpoint, speculative_config=NGRAM | {"rejection_sample_method": "lucky"}),
        "rejection_sample_method",
        "lucky",
        "invariant",
    )


@pytest.mark.parametrize(
    ("prompt", "needles"),
    [
        (TokensPrompt(prompt_token_ids=[]), ["prompts[1]", "empty"]),
        ("", ["prompts[1]"]),
        (TokensPrompt(prompt_token_ids=[1, 300]), ["prompt_token_ids", "299", "300"]),
        (TokensPrompt(prompt_token_ids=[1, -1]), ["prompt_token_ids", "-1"]),
        (TokensPrompt(prompt_token_ids=[2**40]), ["prompt_token_ids", str(2**40)]),
        (TokensPrompt(prompt_token_ids=[5] * 64), ["64 tokens", "max_model_len=64", "63"]),
        (TokensPrompt(prompt_token_ids=[1.5]), ["prompt_token_ids", "integers", "1.5"]),
        (7, ["prompts[1]", "7"]),
        ({"text": "x"}, ["prompts[1]", "text"]),
        ({"prompt": "x", "multi_modal_data": {"image": 1}}, ["multi_modal_data"]),
        ({"prompt": "x", "cache_salt": ""}, ["cache_salt"]),
    ],
)
def test_prompts(llm, prompt, needles):
    good = TokensPrompt(prompt_token_ids=[5, 6, 7])
    before = llm.generate(good, GREEDY, use_tqdm=False)
    refused(lambda: llm.generate([good, prompt], GREEDY, use_tqdm=False), *needles, kind=ConfigError)
    assert not llm.llm_engine.has_unfinished_requests()
    after = llm.generate(good, GREEDY, use_tqdm=False)
    assert after[0].outputs[0].token_ids == before[0].outputs[0].token_ids


@pytest.mark.parametrize(
    ("fields", "needles"),
    [
        ({"temperature": float("nan")}, ["temperature", "nan"]),
        ({"temperature": -1}, ["temperature", "-1"]),
        ({"top_p": 0}, ["top_p", "0"]),
        ({"top_k": -2}, ["top_k", "-2"]),
        ({"max_tokens": 0}, ["max_tokens", "0"]),
        ({"min_tokens": 20}, ["min_tokens", "max_tokens"]),
        ({"stop": ""}, ["stop"]),
        ({"logprobs": -3}, ["logprobs", "-3"]),
        ({"speculation": -1}, ["speculation", "-1"]),
        ({"best_of": 3}, ["best_of"]),
        ({"structured_outputs": {"regex": 7}}, ["structured_outputs.regex", "7"]),
    ],
)
def test_sampling_params(fields, needles):
    refused(lambda: SamplingParams(**fields), *needles, kind=ConfigError)


@pytest.mark.parametrize(
    "fields",
    [{"stop_token_ids": [300]}, {"logit_bias": {300: 1.0}}, {"allowed_token_ids": [300]}, {"logprobs": 400}],
)
def test_sampling_params_against_the_vocabulary(llm, fields):
    (name,) = fields
    refused(
        lambda: llm.generate({"prompt_token_ids": [5, 6]}, SamplingParams(**fields), use_tqdm=False),
        name,
        "300" if name != "logprobs" else "400",
        kind=ConfigError,
    )


def test_generate_arguments(llm):
    prompt = TokensPrompt(prompt_token_ids=[5, 6])
    refused(lambda: llm.generate(), "prompts")
    refused(lambda: llm.generate("x", prompt_token_ids=[1]), "prompt_token_ids")
    refused(lambda: llm.generate([prompt] * 3, [GREEDY] * 2), "sampling_params", "3", "2")
    refused(lambda: llm.generate(prompt, {"temperature": 0}), "sampling_params")
    refused(lambda: llm.generate(prompt, GREEDY, lora_request=object()), "lora_request", "enable_lora=True")
    refused(
        lambda: llm.generate(prompt, GREEDY, priority=[1]), "priority[0]=1", "scheduling_policy", "'fcfs'"
    )
    refused(lambda: llm.generate(prompt, GREEDY, priority=[0, 0]), "priority", "2", "1")
    refused(lambda: llm.generate(prompt, GREEDY, priority=["high"]), "priority[0]", "integer", "high")


def test_a_request_id_in_use(checkpoint):
    engine = LLMEngine.from_engine_args(EngineArgs(model=str(checkpoint), max_model_len=64))
    engine.add_request("a", {"prompt_token_ids": [5]}, GREEDY)
    refused(lambda: engine.add_request("a", {"prompt_token_ids": [5]}, GREEDY), "'a'", "in use")
    engine.abort_request("a")
    engine.add_request("a", {"prompt_token_ids": [5]}, GREEDY)
    engine.shutdown()


def test_a_missing_shard_is_named(tmp_path):
    path = tiny_checkpoint(tmp_path, shards=2)
    lost = sorted(path.glob("*.safetensors"))[0]
    lost.unlink()
    refused(lambda: LLM(path), lost.name, kind=ConfigError)


def test_a_model_that_is_not_there(tmp_path):
    refused(lambda: LLM(tmp_path / "nowhere"), "nowhere", kind=ConfigError)


def test_a_truncated_gguf_is_named(tmp_path):
    path = tmp_path / "cut.gguf"
    path.write_bytes(b"GGUF\x03\x00\x00\x00" + b"\x00" * 40)
    refused(lambda: LLM(path), "cut.gguf", kind=ConfigError)


def test_an_architecture_that_is_not_built(tmp_path):
    path = tiny_checkpoint(tmp_path)
    config = json.loads((path / "config.json").read_text())
    config["architectures"] = ["MambaForCausalLM"]
    (path / "config.json").write_text(json.dumps(config))
    refused(lambda: LLM(path), "MambaForCausalLM", "LlamaForCausalLM", kind=ConfigError)


def test_keywords_without_meaning_are_warned_about_once(checkpoint, caplog):
    for _ in range(2):
        LLM(checkpoint, swap_space=4, max_model_len=64).shutdown()
    assert sum("swap_space" in record.message for record in caplog.records) <= 1
