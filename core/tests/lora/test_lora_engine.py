"""Requests with adapters against the checkpoint that each is merged into, in one batch and alone."""

from __future__ import annotations

import pytest
import torch
from specdecode import LoRARequest, SamplingParams
from specdecode.runner.dense import DenseRow, dense_forward
from specdecode.testing.adapters import write_adapter


@pytest.mark.parametrize("fused", ["0", "1"])
@pytest.mark.parametrize("order", ["plain", "late"])
def test_several_adapters_and_none_in_a_batch(lab, monkeypatch, order, fused):
    monkeypatch.setenv("SPECDECODE_FUSED", fused)
    prompts, params = lab.asks(8)
    with lab.engine(async_scheduling=order == "late") as llm:
        together = lab.generate(llm, prompts, params)
        lab.check(prompts, params, together)
        for index, kind in enumerate(lab.MIXED):
            assert lab.generate(llm, prompts[index : index + 1], params[index], [kind]) == [together[index]]
        # not by chance: the adapters change what is written
        plain = lab.generate(llm, prompts, params, [None] * 8)
        assert [a != b for a, b in zip(plain, together, strict=True)] == [k is not None for k in lab.MIXED]


@pytest.mark.parametrize("fused", ["0", "1"])
def test_logits(lab, monkeypatch, fused):
    monkeypatch.setenv("SPECDECODE_FUSED", fused)
    ids = list(range(7, 60))
    with lab.engine() as llm:
        for index in range(3):
            request = lab.request(index)
            llm.generate(
                [{"prompt_token_ids": [5]}],
                SamplingParams(max_tokens=1),
                use_tqdm=False,
                lora_request=request,
            )
            model = llm.llm_engine.core.runner.model
            slot = llm.llm_engine.adapter_of(request).slot
            other = lab.merged(index).llm_engine.core.runner.model
            got = model.compute_logits(dense_forward(model, ids, adapter=slot)[0])
            expected = other.compute_logits(dense_forward(other, ids)[0])
            torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("fused", ["0", "1"])
def test_a_token_without_an_adapter_has_the_targets_bits(lab, monkeypatch, fused):
    monkeypatch.setenv("SPECDECODE_FUSED", fused)
    ids = list(range(7, 40))
    with lab.engine(enable_lora=False, max_loras=1) as llm:
        other = llm.llm_engine.core.runner.model
        expected = other.compute_logits(dense_forward(other, ids)[0])
    with lab.engine() as llm:
        llm.generate([{"prompt_token_ids": [5]}], use_tqdm=False, lora_request=lab.request(0))
        model = llm.llm_engine.core.runner.model
        slot = llm.llm_engine.adapter_of(lab.request(0)).slot
        config, places = model.config, torch.arange(len(ids))
        row = DenseRow([(config.num_kv_heads, config.head_dim, config.value_dim)], len(ids), model)
        with torch.inference_mode(), model.adapters.of(torch.where(places < 20, -1, slot)):
            meta, caches = row.metadata(places, places + 1), row.caches * config.num_layers
            got = model.compute_logits(model(torch.tensor(ids), places, meta, caches)[0])
        assert torch.equal(got[:20], expected[:20]) and not torch.equal(got[20:], expected[20:])


def test_neither_neighbours_nor_other_adapters_change_a_bit(lab):
    """The logits of a request are the same bits whatever stands beside it, and whichever slot it has."""
    prompts, _ = lab.asks(5)
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=3)
    kinds = [2, 0, None, 1, 2]

    def told(outputs):
        return [
            [{t: p.logprob for t, p in step.items()} for step in output.outputs[0].logprobs]
            for output in outputs
        ]

    with lab.engine() as llm:
        requests = [lab.request(kind) for kind in kinds]
        together = told(llm.generate(prompts, params, use_tqdm=False, lora_request=requests))
    with lab.engine(max_loras=1, enable_prefix_caching=False) as llm:
        for index in reversed(range(5)):
            (alone,) = told(
                llm.generate([prompts[index]], params, use_tqdm=False, lora_request=requests[index])
            )
            assert alone == together[index]


def test_the_prefix_cache_knows_whose_keys_and_values_it_holds(lab):
    prompts, params = (
        [{"prompt_token_ids": list(range(10, 50))}] * 2,
        [SamplingParams(temperature=0, max_tokens=12)] * 2,
    )
    with lab.engine() as llm:
        for kind in (None, 0, 1):
            outputs = [
                llm.generate(prompts[:1], params[0], use_tqdm=False, lora_request=lab.request(kind))[0]
                for _ in range(2)
            ]
            assert [output.num_cached_tokens for output in outputs] == [0, 39]
            assert [output.lora_request for output in outputs] == [lab.request(kind)] * 2
            lab.check(prompts, params, [list(o.outputs[0].token_ids) for o in outputs], [kind] * 2)
        salted = {**prompts[0], "cache_salt": "lora:1"}
        assert not llm.generate([salted], params[0], use_tqdm=False)[0].num_cached_tokens


@pytest.mark.parametrize("order", ["plain", "late"])
def test_preemption(lab, order):
    prompts, params = lab.asks(8, max_tokens=30)
    with lab.engine(num_gpu_blocks_override=40, async_scheduling=order == "late") as llm:
        lab.check(prompts, params, lab.generate(llm, prompts, params))
        assert llm.llm_engine.core.scheduler.num_preemptions
        manager = llm.llm_engine.adapters
        assert not any(adapter.holders for adapter in manager.slots.resident)


@pytest.mark.parametrize("order", ["plain", "late"])
@pytest.mark.parametrize(("slots", "host"), [(1, 1), (1, 2), (2, 3)])
def test_adapters_wait_for_a_slot_and_come_back(lab, order, slots, host):
    prompts, params = lab.asks()
    with lab.engine(max_loras=slots, max_cpu_loras=host, async_scheduling=order == "late") as llm:
        for _ in range(2):
            lab.check(prompts, params, lab.generate(llm, prompts, params))
        manager = llm.llm_engine.adapters
        assert manager.slots.num_loads > 3
        assert len(manager.slots.resident) == slots and len(manager.host_adapters) == host


def test_n_completions(lab):
    (prompt,), _ = lab.asks(1)
    params = SamplingParams(n=3, temperature=0.9, seed=3, max_tokens=10)
    with lab.engine(max_loras=1) as llm:
        (got,) = llm.generate([prompt], params, use_tqdm=False, lora_request=lab.request(0))
    (expected,) = lab.merged(0).generate([prompt], params, use_tqdm=False)
    assert [list(o.token_ids) for o in got.outputs] == [list(o.token_ids) for o in expected.outputs]


def test_files_that_changed_end_the_request_that_waits_for_them(lab, tmp_path):
    """What the door has checked is not there any more when the slot is free: that request ends, no other."""
    path = write_adapter(tmp_path / "own", lab.target, seed=9)
    request = LoRARequest("own", 9, str(path))
    prompts, params = lab.asks(3, max_tokens=6)
    with lab.engine(max_loras=1) as llm:
        engine = llm.llm_engine
        for index, own in enumerate((lab.request(0), request, lab.request(1))):
            engine.add_request(str(index), prompts[index], params[index], lora_request=own)
        write_adapter(path, lab.target, seed=10, rank=4)
        outputs = {}
        while engine.has_unfinished_requests():
            outputs |= {output.request_id: output.outputs[0] for output in engine.step() if output.finished}
        assert [outputs[str(i)].finish_reason for i in range(3)] == ["length", "error", "length"]
        assert "own" in outputs["1"].error and "changed" in outputs["1"].error
        with pytest.raises(ValueError, match="a number of its own"):
            llm.generate(prompts, params, lora_request=request)
        engine.core.scheduler.check()


def test_metrics(lab):
    prompts, params = lab.asks(3, ignore_eos=True)
    with lab.engine(speculative_config={"method": "ngram", "num_speculative_tokens": 3}) as llm:
        outputs = llm.generate(
            prompts, params, use_tqdm=False, lora_request=[lab.request(k) for k in (0, 1, None)]
        )
        found = {(m.name, m.labels.get("lora_name")): m for m in llm.get_metrics()}
        for index in range(2):
            name, told = f"adapter-{index}", outputs[index].metrics
            assert found["specdecode:lora_generation_tokens", name].value == 16
            assert found["specdecode:lora_spec_decode_num_draft_tokens", name].value == told.drafted
            assert found["specdecode:lora_spec_decode_num_accepted_tokens", name].value == told.accepted
            assert found["specdecode:lora_spec_decode_num_drafts", name].value == told.draft_steps
        info = found["vllm:lora_requests_info", None]
        assert info.labels == {"max_lora": "3", "running_lora_adapters": "", "waiting_lora_adapters": ""}
        engine = llm.llm_engine
        engine.add_request("a", prompts[0], params[0], lora_request=lab.request(2))
        engine.step()
        (info,) = [m for m in llm.get_metrics() if m.name == "vllm:lora_requests_info"]
        assert info.labels["running_lora_adapters"] == "adapter-2"


def test_outputs_are_checked_with_their_adapter(lab):
    config = {"method": "ngram", "num_speculative_tokens": 3}
    prompts, params = lab.asks(4)
    with lab.engine(speculative_config=config, shadow_rate=1.0, max_loras=2) as llm:
        llm.generate(prompts, params, use_tqdm=False, lora_request=[lab.request(k) for k in (0, 1, 2, None)])
        found = {m.name: m.value for m in llm.get_metrics() if m.name.startswith("specdecode:shadow")}
        mismatches = sum(m.value for m in llm.get_metrics() if m.name == "specdecode:shadow_mismatches")
        assert found["specdecode:shadow_checked"] == 4 and not mismatches


def test_steps_are_captured_with_adapters_and_without(lab, monkeypatch):
    """Where nobody has an adapter, the step is that of an engine without room."""
    with lab.engine(async_scheduling=True) as llm:
        steady, told = llm.llm_engine.core.steady, []
        run = steady.run
        monkeypatch.setattr(steady, "run", lambda *args: told.append(steady.seats.adapted) or run(*args))
        prompts, params = lab.asks(2)
        lab.generate(llm, prompts, params, [None, None])
        assert told and not any(told)
        told.clear()
        params[1].max_tokens = 4  # the one with an adapter ends first
        lab.check(prompts, params, lab.generate(llm, prompts, params, [None, 1]), [None, 1])
        assert told[0] and not told[-1]
