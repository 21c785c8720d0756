"""New weights in place: the tokens, and the drafts, are those of an engine that was made of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
PROMPTS = [[5, 9, 5, 9, 5, 9, 7], [40, 41, 42, 40, 41, 42, 40, 41], [100, 3, 8]]


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> tuple[Path, Path]:
    """Two checkpoints of one shape."""
    from specdecode.testing.tiny import tiny_checkpoint

    folder = tmp_path_factory.mktemp("weights")
    old, new = (tiny_checkpoint(folder / f"seed-{seed}", seed=seed, output_scale=0.3) for seed in (0, 1))
    return old, new


def make(path: Path, speculative_config: Any = None, **changes: Any):
    from specdecode.api.args import EngineArgs
    from specdecode.api.engine import LLMEngine

    fields = {"dtype": "float32", "device": "cpu", "max_model_len": 96, "skip_tokenizer_init": True}
    return LLMEngine(
        EngineArgs.of({"model": str(path), "speculative_config": speculative_config, **fields, **changes})
    )


def add(engine, name: str = "r", **changes: Any) -> None:
    from specdecode import SamplingParams

    for index, prompt in enumerate(PROMPTS):
        fields = {"temperature": 0.7 * (index % 2), "seed": index, "max_tokens": 20, "ignore_eos": True}
        engine.add_request(f"{name}{index}", {"prompt_token_ids": prompt}, SamplingParams(**fields | changes))


def drain(engine) -> dict[str, list[int]]:
    done = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                done[output.request_id] = list(output.outputs[0].token_ids)
    return done


def accepted(engine) -> dict[str, float]:
    names = ("vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens")
    return {metric.name: metric.value for metric in engine.get_metrics() if metric.name in names}


def run(engine, name: str = "r") -> tuple[dict[str, list[int]], dict[str, float]]:
    """Outputs, and what of the drafts was accepted for them."""
    before = accepted(engine)
    add(engine, name)
    outputs = drain(engine)
    after = accepted(engine)
    return outputs, {key: value - before[key] for key, value in after.items()}


def config_of(method: str, target: Path, folder: Path) -> dict[str, Any] | None:
    from specdec_eagle.testing import write_head
    from specdec_medusa.testing import write_heads

    many = {"num_speculative_tokens": 3}
    if method == "plain":
        return None
    if method == "ngram":
        return {"method": "ngram", **many}
    if method == "medusa":
        path = write_heads(folder / "medusa", "head-only", target, output="none", heads=3)
    elif method == "eagle":
        path = write_head(folder / "eagle", "eagle", target)
    else:
        path = write_head(folder / "eagle3", "eagle3", target, draft_vocab=150, lm_head=False)
    if method == "cascade":
        head = {"model": str(path), "aux_layer_ids": [0, 1, 2], **many}
        children = [{"method": "ngram", **many}, head]
        return {"method": "cascade", "proposers": children}
    taps = {} if method in ("medusa", "eagle") else {"aux_layer_ids": [0, 1, 2]}
    return {"model": str(path), **many, **taps}


METHODS = ("plain", "ngram", "medusa", "eagle", "eagle3", "cascade")


@pytest.mark.parametrize(("method", "fused", "overlapped"), [
    *((method, False, False) for method in METHODS),
    ("eagle3", True, False), ("eagle3", False, True), ("medusa", True, True), ("plain", True, True),
])  # fmt: skip
def test_tokens_and_drafts_are_those_of_an_engine_made_of_the_new_weights(
    method, fused, overlapped, weights, tmp_path, monkeypatch
):
    monkeypatch.setenv("SPECDECODE_FUSED", "1" if fused else "0")
    old, new = weights
    config = config_of(method, old, tmp_path)
    engine, fresh = (make(path, config, async_scheduling=overlapped) for path in (old, new))
    before, _ = run(engine)
    done = engine.update_weights(new)
    assert done.num_tensors > 10 and done.source == str(new)
    wanted, got = run(fresh), run(engine)
    assert got == wanted and got[0] != before
    assert method in ("plain", "ngram") or got[1]["vllm:spec_decode_num_accepted_tokens"]
    assert run(engine, "again") == run(fresh, "again")  # by way of the prefix cache
    for made in (engine, fresh):
        made.shutdown()


def test_ranks_take_their_shares(weights, tmp_path):
    from specdecode.contract import ConfigError
    from specdecode.models import load_weights
    from specdecode.testing.ranks import ranks_in_threads

    old, new = weights
    config = config_of("eagle3", old, tmp_path)
    with ranks_in_threads():
        shared, fresh = (make(path, config, tensor_parallel_size=2) for path in (old, new))
        with pytest.raises(ConfigError, match="refused under tensor_parallel_size=2"):
            shared.update_weights(dict(load_weights(new)))
        add(shared)
        shared.step()
        shared.update_weights(new, mode="abort")
        drain(shared)
        assert run(shared) == run(fresh)
        for engine in (shared, fresh):
            engine.shutdown()


def test_adapters_are_those_of_the_new_weights(weights, tmp_path):
    from specdecode import SamplingParams
    from specdecode.lora.request import LoRARequest
    from specdecode.testing.adapters import write_adapter

    old, new = weights
    adapter = LoRARequest("own", 1, str(write_adapter(tmp_path / "adapter", old)))
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    found = []
    engine, fresh = (make(path, NGRAM, enable_lora=True) for path in (old, new))
    for round_, own in enumerate((engine, engine, fresh)):
        if round_ == 1:
            own.update_weights(new)
        own.add_request(f"r{round_}", {"prompt_token_ids": PROMPTS[0]}, params, lora_request=adapter)
        found.append(drain(own)[f"r{round_}"])
    assert found[0] != found[1] == found[2] != run(fresh)[0]["r0"]


@pytest.mark.parametrize("changes", [
    {}, {"quantization": "int8"}, {"exact": False},
])  # fmt: skip
@pytest.mark.parametrize("kind", ["apart", "tied", "experts"])
def test_packed_weights_are_packed_again(changes, kind, tmp_path):
    from specdecode.models import load_weights, weight_bytes
    from specdecode.testing.tiny import tiny_checkpoint

    family = "mixtral" if kind == "experts" else "llama"
    old, new = (
        tiny_checkpoint(tmp_path / str(seed), family, seed=seed, tie=kind == "tied") for seed in (0, 1)
    )
    engine, fresh = (make(path, dtype="bfloat16", **changes) for path in (old, new))
    num_bytes = weight_bytes(engine.core.runner.model)
    engine.update_weights(load_weights(new))
    assert run(engine)[0] == run(fresh)[0]
    assert weight_bytes(engine.core.runner.model) == num_bytes


def test_modules_that_the_target_holds_come_with_its_new_weights(tmp_path):
    from specdec_mtp.testing import write_target
    from specdecode.models import load_weights

    config = {"method": "mtp", "num_speculative_tokens": 2}
    old, new = (write_target(tmp_path / str(seed), modules=2, seed=seed) for seed in (0, 1))
    fresh = make(new, config)
    wanted = run(fresh)
    assert wanted[1]["vllm:spec_decode_num_accepted_tokens"]
    for source in (str(new), dict(load_weights(new))):
        engine = make(old, config)
        engine.update_weights(source)
        assert run(engine) == wanted
    # A trainer's weights may be those of the body alone: then the modules stay what they are.
    engine = make(old, config)
    engine.update_weights({n: t for n, t in load_weights(new) if "mtp_layers" not in n})
    assert run(engine)[0] == wanted[0]
    assert not engine.core.drafting.proposer.failures


@pytest.mark.parametrize("source", ["files", "tensors"])
def test_a_model_that_transformers_runs(source, tmp_path):
    import torch
    import transformers

    fields = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": 300}
    paths = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        config = transformers.GPT2Config(**fields, bos_token_id=1, eos_token_id=2)
        transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / str(seed))
        paths.append(tmp_path / str(seed))
    engine, fresh = (make(path, {"method": "ngram", "num_speculative_tokens": 3}) for path in paths)
    before = run(engine)[0]
    given = paths[1] if source == "files" else fresh.core.runner.model.model.state_dict()
    engine.update_weights(given)
    assert run(engine) == run(fresh) != (before, {})
    with pytest.raises(Exception, match="lacks 1 tensors"):
        engine.update_weights({n: t for n, t in fresh.core.runner.model.model.state_dict().items()
                               if not n.endswith("h.0.ln_1.weight")})  # fmt: skip


def rewritten(path: Path, folder: Path, change) -> Path:
    """A copy of a checkpoint with its config or tensors changed."""
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(path, folder)
    config, tensors = (
        json.loads((folder / "config.json").read_text()),
        load_file(folder / "model.safetensors"),
    )
    change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


BODY = "model.layers.1.mlp.down_proj.weight"
REFUSED = {
    "a missing tensor": (lambda c, t: t.pop(BODY), "lacks 1 tensors .*layers.1.mlp.down_proj"),
    "another shape": (lambda c, t: t.update({BODY: t[BODY][:, :-1].contiguous()}), "expected shape .*127"),
    "another name": (lambda c, t: t.update({"model.extra.weight": t[BODY].clone()}), "no place for .*extra"),
    "another size": (lambda c, t: c.update(intermediate_size=96), "differs in intermediate_size"),
    "other positions": (lambda c, t: c.update(rope_theta=5e5, rope_parameters=None), "differs in rope"),
    "another family": (
        lambda c, t: c.update(architectures=["MistralForCausalLM"]),
        "differs in architecture",
    ),
}


@pytest.fixture(scope="module")
def engine(weights):
    engine = make(weights[0], {"method": "ngram", "num_speculative_tokens": 3}, shadow_rate=1.0)
    yield engine
    engine.shutdown()


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_changes_nothing(case, weights, engine, tmp_path):
    from specdecode.contract import ConfigError

    change, message = REFUSED[case]
    path = rewritten(weights[1], tmp_path / "changed", change)
    before, _ = run(engine)
    add(engine)
    for _ in range(3):
        engine.step()
    with pytest.raises(ConfigError, match=message):
        engine.update_weights(path, mode="abort")
    assert drain(engine) == before  # those that run go on as if nothing had been asked


@pytest.mark.parametrize(("source", "mode", "message"), [
    (3, "wait", "must be a model's directory, .*got int"), ([("a", 1)], "wait", "floating dtype, got 'a': 1"),
    ("nowhere", "wait", "no file or directory"), ("x", "later", "mode must be one of wait, abort, keep"),
])  # fmt: skip
def test_bad_arguments(source, mode, message, engine):
    from specdecode.contract import ConfigError

    with pytest.raises(ConfigError, match=message):
        engine.update_weights(source, mode=mode)


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("mode", ["wait", "abort", "keep"])
def test_requests_that_run_and_wait_meanwhile(mode, overlapped, weights):
    from specdecode import SamplingParams, TokensPrompt

    old, new = weights
    config = {"method": "ngram", "num_speculative_tokens": 3}
    changes = {"max_num_seqs": 2, "async_scheduling": overlapped, "shadow_rate": 1.0}  # the third waits
    engine, plain, after = make(old, config, **changes), make(old), make(new)
    by_old, by_new = run(plain)[0], run(after)[0]
    add(engine)
    given: dict[str, list[int]] = {}
    for _ in range(4):
        given |= {output.request_id: list(output.outputs[0].token_ids) for output in engine.step()}
    begun = {name: tokens for name, tokens in given.items() if tokens}
    assert set(begun) == {"r0", "r1"}
    engine.update_weights(new, mode=mode)
    ended: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        ended |= {output.request_id: output.outputs[0] for output in engine.step() if output.finished}
    tokens = {name: list(output.token_ids) for name, output in ended.items()}
    if mode == "wait":
        assert tokens == by_old
    elif mode == "abort":
        assert {output.finish_reason for output in ended.values()} == {"abort"}
        assert all(by_old[name][: len(own)] == own for name, own in tokens.items())
    else:
        assert tokens["r2"] == by_new["r2"]  # it had not begun
        for name, own in begun.items():
            kept = tokens[name][: len(own)]
            assert kept == own == by_old[name][: len(own)]
        # What follows is what the new weights say behind those tokens; greedy, it can be asked for again.
        first = len(tokens["r0"]) - 12
        prompt = TokensPrompt(prompt_token_ids=PROMPTS[0] + tokens["r0"][:first])
        after.add_request("more", prompt, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
        assert drain(after)["more"] == tokens["r0"][first:]
    assert run(engine, "r")[0] == by_new
    checked = {metric.name: metric.value for metric in engine.get_metrics() if "shadow" in metric.name}
    assert not checked["specdecode:shadow_mismatches"]
    engine.core.scheduler.pool.check([])


def test_reading_that_fails_in_the_middle_ends_the_engine(weights, monkeypatch):
    from specdecode.api.updating import WeightsLostError
    from specdecode.models.weights import StoredTensor

    engine = make(weights[0])
    real, count = StoredTensor.map, iter(range(100))

    def failing(self):
        if next(count) == 5:
            raise OSError("the disk is gone")
        return real(self)

    monkeypatch.setattr(StoredTensor, "map", failing)
    with pytest.raises(WeightsLostError, match="the disk is gone"):
        engine.update_weights(weights[1])
    with pytest.raises(WeightsLostError):
        add(engine)


def test_a_hook_that_raises_costs_no_update(weights, caplog):
    engine, fresh = make(weights[0], {"method": "ngram", "num_speculative_tokens": 3}), make(weights[1])

    def fail(update):
        raise RuntimeError("not today")

    engine.core.drafting.proposer.proposer.on_target_updated = fail
    engine.update_weights(weights[1])
    assert "on_target_updated" in caplog.text
    assert run(engine)[0] == run(fresh)[0]
