"""vLLM's engine keywords: each that works (with speculation on), does nothing, or is refused."""

from __future__ import annotations

import logging
import runpy
from pathlib import Path

import pytest
import torch
from specdecode import LLM, EngineArgs, LLMEngine, SamplingParams
from specdecode.api import keywords as table
from specdecode.api.args import EngineFields
from specdecode.api.keywords import foreign_keywords
from specdecode.api.legacy import FLAT, OLD
from specdecode.config import SpeculativeConfig, fields_of
from specdecode.contract import ConfigError
from specdecode.testing import scripted
from specdecode.testing.tiny import tiny_checkpoint

ROOT = Path(__file__).resolve().parent.parent
FOREIGN = foreign_keywords().values()
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
PROMPTS = [{"prompt_token_ids": ids} for ids in ([100, 101] * 4, [60], list(range(40, 80)))]
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    torch.set_num_threads(1)
    scripted.install()
    return str(tiny_checkpoint(tmp_path_factory.mktemp("tiny"), zero_outputs=True))


@pytest.fixture(autouse=True)
def _nothing_was_warned_about(monkeypatch):
    monkeypatch.setattr(table, "_warned", set())


def run(checkpoint: str, speculative_config=NGRAM, **keywords) -> tuple[LLM, list[list[int]]]:
    with LLM(checkpoint, speculative_config=speculative_config, **({"dtype": "float32"} | keywords)) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        return llm, [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def expected(checkpoint):
    return run(checkpoint, None)[1]


def metric(llm: LLM, name: str) -> float:
    return {metric.name: metric.value for metric in llm.get_metrics()}[name]


def steps(llm: LLM) -> float:
    return metric(llm, "specdecode:steps")


#: Keyword -> a value other than the default where there is one, and what it changes.
WORKS = {
    "model": (None, lambda llm, path: llm.llm_engine.args.model == path),
    "runner": ("generate", None),
    "tokenizer": ("{checkpoint}", lambda llm, path: llm.get_tokenizer().name_or_path == path),
    "tokenizer_mode": ("fast", lambda llm, path: llm.get_tokenizer().is_fast),
    "skip_tokenizer_init": (True, lambda llm, path: llm.get_tokenizer() is None),
    "trust_remote_code": (True, None),
    "tensor_parallel_size": (1, None),  # more: tests/parallel
    "distributed_executor_backend": ("mp", None),
    "dtype": ("float", lambda llm, path: llm.llm_engine.target.dtype == "float32"),
    "quantization": (None, None),  # int8 wants bfloat16: tests/test_exact_rows.py
    "kv_cache_dtype": ("auto", None),  # other output: tests/test_float8_kv.py
    "exact": (True, None),
    "attention_backend": ("native", None),
    "revision": ("main", None),
    "seed": (7, lambda llm, path: llm.llm_engine.args.seed == 7),
    "gpu_memory_utilization": (0.5, None),
    "enforce_eager": (True, None),
    "max_model_len": (64, lambda llm, path: llm.llm_engine.target.max_model_len == 64),
    "max_num_seqs": (1, lambda llm, path: steps(llm) > 3 * 3),
    "max_num_batched_tokens": (64, lambda llm, path: llm.llm_engine.args.token_budget == 64),
    "block_size": (4, lambda llm, path: llm.memory_plan().block_size == 4),
    "enable_prefix_caching": (False, None),
    "enable_chunked_prefill": (False, None),
    "num_gpu_blocks_override": (40, lambda llm, path: llm.memory_plan().num_blocks == 40),
    "load_format": ("safetensors", None),
    "device": ("cpu", lambda llm, path: llm.llm_engine.target.device == "cpu"),
    "scheduling_policy": ("priority", lambda llm, path: llm.llm_engine.args.scheduling_policy == "priority"),
    "async_scheduling": (
        True,
        lambda llm, path: type(llm.llm_engine.core).__name__ == "OverlappedEngineCore",
    ),
    "max_admission_delay": (0.0, lambda llm, path: llm.llm_engine.args.max_admission_delay == 0),
    "structured_outputs_config": (
        {"disable_any_whitespace": True},
        lambda llm, path: llm.llm_engine.args.structured_outputs_config.disable_any_whitespace,
    ),
    "shadow_rate": (1.0, lambda llm, path: metric(llm, "specdecode:shadow_checked") == 3),
    "enable_lora": (True, lambda llm, path: llm.llm_engine.adapters.limits.max_loras == 1),
    "max_loras": (1, None),  # others want enable_lora: core/tests/lora
    "max_lora_rank": (16, None),
    "max_cpu_loras": (None, None),
    "limit_mm_per_prompt": ({"image": 0}, None),  # more: tests/images
    "allowed_local_media_path": ("/tmp", None),
    "allowed_media_domains": (["localhost"], None),
    "disable_plugins": (
        ["nobody"], lambda llm, path: llm.llm_engine.args.disable_plugins == ("nobody",)
    ),
    "speculative_config": (NGRAM, lambda llm, path: llm.llm_engine.method == "ngram"),
}  # fmt: skip


def test_every_field_is_in_the_table_above():
    assert set(WORKS) == {field.name for field in fields_of(EngineFields)}


@pytest.mark.parametrize("name", [name for name in WORKS if name != "model"])
def test_a_keyword_that_works(checkpoint, expected, name):
    value, effect = WORKS[name]
    keywords = {name: checkpoint if value == "{checkpoint}" else value}
    llm, tokens = run(checkpoint, **keywords)
    assert tokens == expected
    assert metric(llm, "vllm:spec_decode_num_accepted_tokens") > 0
    assert effect is None or effect(llm, checkpoint)


@pytest.mark.parametrize("name", ["max_num_seqs", "block_size", "enable_prefix_caching", "seed", "dtype"])
def test_none_asks_for_the_default(name):
    assert EngineArgs("x", **{name: None}) == EngineArgs("x")


def test_no_keyword_is_of_two_kinds():
    fields = {field.name for field in fields_of(EngineFields)}
    kinds = [fields, set(FLAT), set(OLD), {keyword.name for keyword in FOREIGN}]
    assert len(set.union(*kinds)) == sum(map(len, kinds))


@pytest.mark.parametrize("keyword", [k for k in FOREIGN if not k.refused], ids=lambda k: k.name)
def test_a_keyword_without_meaning_is_warned_about_once(keyword, caplog):
    for _ in range(2):
        assert EngineArgs("x", **{keyword.name: 3}) == EngineArgs("x")
    assert [record.getMessage() for record in caplog.records] == [
        f"{keyword.name} has no effect here: {keyword.why}"
    ]


@pytest.mark.parametrize("keyword", [k for k in FOREIGN if k.refused], ids=lambda k: k.name)
def test_a_refused_keyword_says_why_and_may_ask_for_nothing(keyword, caplog):
    for value in (None, *keyword.off):
        assert EngineArgs("x", **{keyword.name: value}) == EngineArgs("x")
    assert not caplog.records
    with pytest.raises(ConfigError) as caught:
        EngineArgs("x", **{keyword.name: "something"})
    shown = keyword.name if keyword.secret else f"{keyword.name}='something'"
    assert str(caught.value) == f"{shown} is refused: {keyword.why}"


def test_a_token_is_never_printed():
    with pytest.raises(ConfigError) as caught:
        EngineArgs("x", hf_token="hf_abc")
    assert "hf_abc" not in str(caught.value) and "HF_TOKEN" in str(caught.value)


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("max_model_length", "max_model_len"),
        ("tensor_paralel_size", "tensor_parallel_size"),
        ("swap_spaces", "swap_space"),
        ("pipeline_parallel_sizes", "pipeline_parallel_size"),
        ("speculative_modell", "speculative_model"),
        ("spec_methods", "spec_method"),
    ],
)
@pytest.mark.parametrize(("make", "owner"), [(LLM, "LLM"), (EngineArgs, "EngineArgs")])
def test_a_keyword_in_no_table_is_an_error_with_the_nearest_name(checkpoint, typo, meant, make, owner):
    with pytest.raises(ConfigError, match=f"{owner}.{typo} is not a known key; did you mean '{meant}'"):
        make(checkpoint, **{typo: 1})


def test_all_faults_are_told_at_once():
    with pytest.raises(ConfigError) as caught:
        EngineArgs(
            "x",
            enable_prompt_adapter=True,
            max_num_seqs=0,
            bloc_size=3,
            speculative_model="a",
            spec_model="b",
            device=3,
        )
    told = "\n".join(caught.value.faults)
    assert len(caught.value.faults) == 5
    for needle in (
        "enable_prompt_adapter=True",
        "max_num_seqs",
        "bloc_size",
        "contradicts",
        "EngineArgs.device",
    ):
        assert needle in told


def test_engine_arguments_are_frozen_and_make_an_engine(checkpoint):
    import attrs

    args = EngineArgs(model=checkpoint, swap_space=4, speculative_config=NGRAM, max_model_len=64)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        args.seed = 3
    engine = LLMEngine.from_engine_args(attrs.evolve(args, max_num_seqs=2))
    assert engine.method == "ngram" and engine.args.max_num_seqs == 2
    engine.shutdown()


# -- old spellings ----------------------------------------------------------------------------------
def written(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


TODAY = {
    "method": "ngram",
    "num_speculative_tokens": 5,
    "prompt_lookup_max": 4,
    "prompt_lookup_min": 1,
}
OLD_FLAT = {
    "speculative_model": "[ngram]",
    "num_speculative_tokens": 5,
    "ngram_prompt_lookup_max": 4,
    "ngram_prompt_lookup_min": 1,
}


@pytest.mark.parametrize(
    "keywords",
    [
        OLD_FLAT,
        {"speculative_config": OLD_FLAT},
        {"speculative_config": {"model": "[ngram]", "num_speculative_tokens": 5},
         "ngram_prompt_lookup_max": 4, "ngram_prompt_lookup_min": 1},
        {"speculative_config": {**TODAY, "method": "ngram_gpu"}},
        {"spec_method": "ngram_gpu", "speculative_config": {k: v for k, v in TODAY.items() if k != "method"}},
    ],
)  # fmt: skip
def test_an_old_spelling_runs_and_one_warning_prints_the_new_one(checkpoint, expected, caplog, keywords):
    llm, tokens = run(checkpoint, **({"speculative_config": None} | keywords))
    assert tokens == expected and metric(llm, "vllm:spec_decode_num_accepted_tokens") > 0
    (message,) = written(caplog)
    told = message.split("write speculative_config=")[1].split(";")[0]
    assert eval(told) == TODAY == dict(llm.llm_engine.args.speculative_config)
    assert ("where the target does" in message) == ("ngram_gpu" in str(keywords))


def test_todays_flat_spelling_is_not_warned_about(caplog):
    args = EngineArgs("x", spec_method="ngram", spec_tokens=5)
    assert args.speculative_config == SpeculativeConfig(method="ngram", num_speculative_tokens=5)
    assert not written(caplog)


@pytest.mark.parametrize(
    ("keywords", "today"),
    [
        (
            {"speculative_model": "some/draft", "num_speculative_tokens": 5, "speculative_max_model_len": 64},
            {"model": "some/draft", "num_speculative_tokens": 5, "max_model_len": 64},
        ),
        (
            {"speculative_model": "some/head", "speculative_draft_tensor_parallel_size": 1},
            {"model": "some/head", "draft_tensor_parallel_size": 1},
        ),
        (
            {
                "speculative_model": "[ngram]",
                "speculative_disable_by_batch_size": 8,
                "spec_decoding_acceptance_method": "rejection_sampler",
                "speculative_model_quantization": None,
            },
            {"method": "ngram", "disable_by_batch_size": 8, "rejection_sample_method": "invariant"},
        ),
        (
            {"speculative_model": "d", "spec_decoding_acceptance_method": "typical_acceptance_sampler",
             "speculative_model_quantization": "fp8"},
            {"model": "d", "rejection_sample_method": "typical", "quantization": "fp8"},
        ),
        ({"speculative_config": {"method": "qwen3_next_mtp"}}, {"method": "mtp"}),
    ],
)  # fmt: skip
def test_each_old_key_becomes_todays(caplog, keywords, today):
    assert dict(EngineArgs("x", **keywords).speculative_config) == today
    (message,) = written(caplog)
    assert f"write speculative_config={today!r}" in message


def test_every_old_keyword_is_translated(caplog):
    for old, key in OLD.items():
        args = EngineArgs("x", **{old: 3})
        assert dict(args.speculative_config) == {key: 3}
        assert f"{old}=3: old spelling; write speculative_config={{'{key}': 3}}" in written(caplog)


def test_old_keywords_left_at_none_say_nothing(caplog):
    args = EngineArgs("x", **dict.fromkeys([*OLD, *FLAT]))
    assert args.speculative_config is None and not written(caplog)


def test_an_old_spelling_of_a_draft_model_reaches_the_draft(checkpoint, expected, caplog):
    llm, tokens = run(
        checkpoint,
        None,
        speculative_model=checkpoint,
        num_speculative_tokens=3,
        spec_method="scripted-small-draft",
    )
    assert tokens == expected and llm.llm_engine.method == "scripted-small-draft"
    assert metric(llm, "vllm:spec_decode_num_accepted_tokens") > 0
    assert len(written(caplog)) == 1


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"num_speculative_tokens": 5, "speculative_config": {"num_speculative_tokens": 3}},
         "num_speculative_tokens=5 contradicts speculative_config.num_speculative_tokens=3"),
        ({"speculative_model": "[ngram]", "spec_method": "suffix"}, "contradicts"),
        ({"speculative_config": {"method": "custom_class", "model": "pkg.Drafter"}}, r"docs/plugins\.md"),
        ({"speculative_config": 7}, "must be a mapping, a JSON string or a SpeculativeConfig, got 7"),
    ],
)  # fmt: skip
def test_what_cannot_be_translated_is_refused(keywords, message):
    with pytest.raises(ConfigError, match=message):
        EngineArgs("x", **keywords)


def test_the_page_is_that_of_the_table():
    made = runpy.run_path(str(ROOT / "docs/make_keywords.py"))["page"]()
    page = (ROOT / "docs/keywords.md").read_text(encoding="utf-8")
    assert page == made, "docs/keywords.md is stale: run python docs/make_keywords.py"
    for keyword in FOREIGN:
        assert f"`{keyword.name}`" in page
