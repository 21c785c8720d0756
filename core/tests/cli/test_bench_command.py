"""``specdecode bench`` on a real engine with a tiny model."""

import gzip
import json

import pytest

NGRAM = ("--spec-method", "ngram", "--spec-tokens", "3", "--spec-option", "prompt_lookup_min=1")
ROW = {
    "task",
    "method",
    "batch_size",
    "tokens_per_s",
    "speedup",
    "decode_speedup",
    "acceptance_length",
    "tokens_per_target_step",
    "acceptance_per_position",
    "identical",
    "synthetic",
    "lossy",
    "acceptance_rate",
    "drafts_per_target_step",
    "cost_ratio",
    "memory_bound_speedup",
    "efficiency",
    "draft_overhead",
    "seconds",
    "target_seconds",
    "verify_seconds",
    "propose_seconds",
    "other_seconds",
}


@pytest.fixture(scope="session")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "mine.jsonl"
    lines = [
        {"prompt": "abcabcabc", "task": "letters"},
        {"prompt": "x", "task": "letters"},
        {"prompt": "1 2 3"},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


def test_json_is_one_object_and_the_only_output(invoke, tiny_model, prompts, tmp_path):
    stored = tmp_path / "result.json"
    result = invoke(
        "bench", "-m", tiny_model, "--prompts", prompts, "--batch-size", "1,2", "--max-tokens", "24",
        "--ignore-eos", "--json", "--output", str(stored), *NGRAM,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert json.loads(stored.read_text()) == report
    assert set(report) == {"environment", "rows", "advice"}
    rows = report["rows"]
    assert [(r["task"], r["batch_size"], r["method"]) for r in rows] == [
        (task, size, method)
        for size in (1, 2)
        for task in ("letters", "mine")
        for method in ("plain", "ngram")
    ]
    assert all(set(row) == ROW and row["identical"] is True and row["tokens_per_s"] > 0 for row in rows)
    for plain, speculative in zip(rows[::2], rows[1::2], strict=True):
        assert (plain["speedup"], plain["tokens_per_target_step"]) == (1.0, 1.0)
        assert plain["acceptance_length"] is plain["acceptance_per_position"] is None
        assert speculative["speedup"] == speculative["tokens_per_s"] / plain["tokens_per_s"]
        positions = speculative["acceptance_per_position"]
        assert len(positions) == 3 and positions == sorted(positions, reverse=True)
        assert speculative["acceptance_length"] == pytest.approx(1 + sum(positions))
        tokens, drafts = speculative["tokens_per_target_step"], speculative["drafts_per_target_step"]
        assert tokens > 1 and 0 < drafts <= 3 and 0 < speculative["acceptance_rate"] <= 1
        assert speculative["memory_bound_speedup"] == pytest.approx(
            tokens / (speculative["cost_ratio"] * drafts + 1)
        )
        assert speculative["efficiency"] == pytest.approx(speculative["speedup"] / tokens)
        assert speculative["draft_overhead"] > 0 < speculative["cost_ratio"]
        for row in (plain, speculative):
            parts = [row[f"{part}_seconds"] for part in ("target", "verify", "propose", "other")]
            assert sum(parts) == pytest.approx(row["seconds"]) and min(parts) >= 0
    environment = report["environment"]
    assert environment["model"] == tiny_model and environment["num_prompts"] == 3
    assert environment["speculative_config"]["method"] == "ngram" and {"torch", "specdec-ngram"} <= set(
        environment["versions"]
    )


def test_a_profile_says_where_a_step_goes(invoke, tiny_model, prompts, tmp_path):
    traces = tmp_path / "traces" / "here"
    common = ("bench", "-m", tiny_model, "--prompts", prompts, "--max-tokens", "40", "--ignore-eos", *NGRAM)
    common += ("--batch-size", "1,2", "--profile", "--trace-dir", str(traces), "--device", "cpu")
    result = invoke(*common, "--json")
    assert result.exit_code == 0, result.output
    profiles = json.loads(result.stdout)["profile"]
    assert [(p["method"], p["batch_size"]) for p in profiles] == [
        (method, size) for size in (1, 2) for method in ("plain", "ngram")
    ]
    for found in profiles:
        parts = [found[f"{part}_ms"] for part in ("target", "verify", "draft", "host")]
        assert sum(parts) == pytest.approx(found["step_ms"]) and found["idle_ms"] is None
        assert min(found["target_ms"], found["verify_ms"], found["host_ms"]) > 0
        assert (found["draft_ms"] > 0) == (found["method"] == "ngram")
        with gzip.open(found["trace"], "rt") as file:
            names = {event.get("name") for event in json.load(file)["traceEvents"]}
        assert {"specdecode:step", "specdecode:target", "specdecode:prefill"} <= names
    # 40 tokens: the first one is the prompt's, the others take a step each without drafts.
    assert profiles[0]["steps"] == 39 > profiles[1]["steps"]
    shown = invoke(*common).stdout
    assert "Where a decode step's time went" in shown and str(traces) in shown


def test_traces_that_cannot_be_written_are_told_before_the_work(invoke, tiny_model, tmp_path):
    (tmp_path / "file").write_text("")
    place = str(tmp_path / "file" / "traces")
    result = invoke("bench", "-m", tiny_model, "--profile", "--trace-dir", place, *NGRAM)
    assert result.exit_code == 1 and "--trace-dir: cannot make" in result.stderr


def test_seeded_sampling_is_compared_too(invoke, tiny_model, prompts):
    result = invoke(
        "bench", "-m", tiny_model, "--prompts", prompts, "--task", "letters", "--max-tokens", "16",
        "--temperature", "0.9", "--seed", "7", "--json", *NGRAM,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert [row["identical"] for row in json.loads(result.stdout)["rows"]] == [True, True]


def test_synthetic_acceptance_is_marked_and_no_failure(invoke, tiny_model, prompts):
    result = invoke(
        "bench", "-m", tiny_model, "--prompts", prompts, "--task", "letters", "--max-tokens", "16", "--json",
        "--spec-config",
        '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1, '
        '"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 1}',
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "synthetic acceptance" in result.stderr
    plain, speculative = json.loads(result.stdout)["rows"]
    assert (plain["synthetic"], speculative["synthetic"]) == (False, True)
    assert speculative["acceptance_length"] == 1


def test_adaptive_lengths_are_measured_like_fixed_ones(invoke, tiny_model, prompts):
    result = invoke(
        "bench", "-m", tiny_model, "--prompts", prompts, "--max-tokens", "24", "--ignore-eos", "--adaptive",
        "--batch-size", "2", "--json", *NGRAM,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert all(row["identical"] for row in report["rows"])
    assert report["environment"]["speculative_config"]["adaptive"] is True


def test_the_table_names_every_row(invoke, tiny_model, prompts):
    result = invoke("bench", "-m", tiny_model, "--prompts", prompts, "--max-tokens", "8", *NGRAM)
    assert result.exit_code == 0, result.output
    first, costs = result.stdout.split("What drafting cost and where the time went")
    tasks = [line.split()[0] for line in costs.splitlines() if "%" in line]
    assert tasks == ["letters", "mine", "all"]
    lines = [line.split() for line in first.splitlines() if line.strip()]
    found = [tuple(line[:2]) for line in lines if len(line) > 2 and line[1] in ("plain", "ngram")]
    assert found == [(task, method) for task in ("letters", "mine", "all") for method in ("plain", "ngram")]


def test_a_dataset_is_read_and_named(invoke, tiny_model, tmp_path):
    path = tmp_path / "questions.jsonl"
    questions = [
        {"question_id": n, "category": kind, "turns": [text, "then?"]}
        for n, kind, text in [(81, "writing", "abab"), (82, "math", "1 2 1 2"), (83, "math", "q")]
    ]
    path.write_text("\n".join(map(json.dumps, questions)))
    result = invoke(
        "bench", "-m", tiny_model, "--dataset", str(path), "--dataset-format", "mt_bench",
        "--num-prompts", "2", "--max-tokens", "8", "--json", *NGRAM,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert [row["task"] for row in report["rows"]] == ["writing"] * 2 + ["math"] * 2
    environment = report["environment"]
    assert environment["num_prompts"] == 2 and environment["prompts"] == str(path)
    assert environment["dataset_format"] == "mt_bench"


def test_a_method_may_be_spelt_as_in_vllm(invoke, tiny_model, prompts):
    result = invoke(
        "bench", "-m", tiny_model, "--prompts", prompts, "--task", "letters", "--max-tokens", "8", "--json",
        "--speculative-config", '{"method": "ngram_gpu", "num_speculative_tokens": 3}',
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert [row["method"] for row in json.loads(result.stdout)["rows"]] == ["plain", "ngram"]


def test_a_difference_is_told_and_ends_with_status_1(invoke, tiny_model, prompts, monkeypatch):
    import attrs
    from specdecode import LLM

    generate = LLM.generate

    def wrong(self, *arguments, **options):
        outputs = generate(self, *arguments, **options)
        if self.llm_engine.method is None:
            return outputs
        completion = outputs[0].outputs[0]
        spoiled = attrs.evolve(completion, token_ids=[*completion.token_ids[:-1], 299])
        return [attrs.evolve(outputs[0], outputs=[spoiled]), *outputs[1:]]

    monkeypatch.setattr(LLM, "generate", wrong)
    result = invoke("bench", "-m", tiny_model, "--prompts", prompts, "--max-tokens", "8", "--json", *NGRAM)
    assert result.exit_code == 1
    rows = json.loads(result.stdout)["rows"]
    assert [row["identical"] for row in rows] == [True, False] * 2
    assert "outputs differ: task letters, prompt 1, batch size 1: output token 7 is 299" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--batch-size", "1,x"), "--batch-size must be positive integers"),
        (("--batch-size", "0"), "--batch-size must be positive integers"),
        (("--task", "poetry"), "task: there is no 'poetry'"),
        (("--spec-config", "{"), "--spec-config is not JSON"),
        (("--spec-config", "[]"), "--spec-config must be an object"),
        (("--spec-config", "{}", "--spec-method", "ngram"), "leave the other --spec-... options out"),
        (("--spec-option", "prompt_lookup_max"), "--spec-option must be KEY=VALUE, got 'prompt_lookup_max'"),
        ((*NGRAM, "--spec-option", "prompt_lookup_maxx=2"), "speculative_config.prompt_lookup_maxx"),
        (("--prompts", "nowhere.txt"), "cannot read nowhere.txt"),
        (("--dataset", "nowhere.json"), "dataset: cannot read nowhere.json"),
        (("--dataset", "a", "--prompts", "b"), "--prompts and --dataset are both given"),
        (("--dataset", "a", "--dataset-format", "gsm8k"), "dataset-format must be one of jsonl, sharegpt"),
        (("--dataset", "repetitive", "--task", "chat"), "there are agent-loop, edit-file, fill-template"),
        (("--dataset", "repetitive", "--task", "edit-file"), "all 5 prompts are longer than"),
        (("--num-prompts", "2"), "--num-prompts would have no effect: only a file of --dataset"),
        (
            ("--dataset", "repetitive", "--dataset-format", "jsonl", "--num-prompts", "2"),
            "--dataset-format and --num-prompts would have no effect",
        ),
        (("--trace-dir", "traces"), "--trace-dir traces is where --profile writes traces: add --profile"),
        (("--spec-model", "no/such/draft"), "no/such/draft"),
        (("--max-tokens", "0"), "max_tokens"),
        (("--output", "no/such/place.json"), "--output: there is no folder no/such to write place.json in"),
        (("--task", "chat"), "task chat, prompts running: prompts[0] has 530 tokens"),
    ],
)
def test_wrong_options_end_with_one_clear_message(invoke, tiny_model, arguments, message):
    result = invoke("bench", "-m", tiny_model, *arguments)
    assert result.exit_code == 1
    assert message in result.stderr and not result.stdout
    assert "Traceback" not in result.stderr


def test_a_quantization_reaches_the_engine_and_the_title(invoke, tiny_model, prompts):
    common = ("bench", "-m", tiny_model, "--prompts", prompts, "--max-tokens", "8", *NGRAM)
    result = invoke(*common, "--quantization", "int8", "--device", "cpu", "--task", "mine")
    assert result.exit_code == 0, result.output
    assert ", int8, " in result.stdout and "yes" in result.stdout
    refused = invoke(*common, "--quantization", "int3")
    assert refused.exit_code == 1
    assert "quantization" in refused.output and "int3" in refused.output
