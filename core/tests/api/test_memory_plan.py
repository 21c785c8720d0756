"""What is charged before KV takes the rest, and what is said when memory runs out."""

from __future__ import annotations

import pytest
import torch
from specdecode import LLM
from specdecode.api.args import EngineArgs
from specdecode.api.memory import MemoryPlan, graph_reserve, plan_memory, stage
from specdecode.contract import ConfigError, Needs, Shape, Tap
from specdecode.kv.store import LayerShape
from specdecode.models import load_model, resolve_model, weight_bytes
from specdecode.runner.profiling import StepMemory, largest_steps, measure_steps
from specdecode.testing.tiny import tiny_checkpoint

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
GIB = 1 << 30
STEPS = StepMemory(largest=3 * GIB, taps=GIB // 2, decode=GIB // 4)
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture
def model(tiny_target):
    return load_model(resolve_model(tiny_target), dtype=torch.float32, device=CPU, max_model_len=256)


@pytest.fixture
def device(monkeypatch):
    """A GPU of 80 GiB of which 20 are in use."""
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device=None: (60 * GIB, 80 * GIB))
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: None)
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda device=None: 18 * GIB)
    return CUDA


def plan(model, device, block_bytes=GIB, longest=256, **options):
    keywords = {"model": "m", "gpu_memory_utilization": 0.9, "max_num_seqs": 64}
    charged = {"scratch_bytes": GIB, "draft_bytes": 2 * GIB, "steps": STEPS, "graph_bytes": GIB}
    for name in list(options):
        if name in charged:
            charged[name] = options.pop(name)
    return plan_memory(EngineArgs(**keywords | options), model, block_bytes, longest, device, **charged)


def test_kv_gets_what_the_others_leave(model, device):
    found = plan(model, device)
    # 72 are granted, 20 in use; 1 scratch, 3 step, 0.5 taps, 1 graphs
    assert found.num_blocks == 46 and found.kv_bytes == 46 * GIB
    assert found.granted_bytes == 72 * GIB
    assert (found.step_bytes, found.tap_bytes, found.graph_bytes) == (3 * GIB, GIB // 2, GIB)
    assert found.other_bytes == 18 * GIB - weight_bytes(model)
    charged = found.weight_bytes + found.draft_bytes + found.other_bytes + found.step_bytes
    charged += found.tap_bytes + found.scratch_bytes + found.graph_bytes + found.kv_bytes
    assert found.granted_bytes - GIB < charged <= found.granted_bytes


@pytest.mark.parametrize("name", ["scratch_bytes", "graph_bytes"])
def test_each_use_is_charged(model, device, name):
    assert plan(model, device, **{name: 11 * GIB}).num_blocks == 36


def test_no_more_than_all_rows_can_fill(model, device):
    assert plan(model, device, block_bytes=1024).num_blocks == 64 * 256 // 16


def test_a_cpu_charges_nothing(model):
    found = plan(model, CPU, block_bytes=GIB)
    assert (found.num_blocks, found.granted_bytes, found.other_bytes) == (4, 0, 0)


def test_the_override_is_obeyed(model, device):
    assert plan(model, device, num_gpu_blocks_override=300).num_blocks == 300


def test_no_room_shows_the_plan(model, device):
    with pytest.raises(ConfigError) as caught:
        plan(model, device, gpu_memory_utilization=0.3)
    said = str(caught.value)
    assert "gpu_memory_utilization=0.3" in said and "max_num_batched_tokens" in said
    assert "largest step" in said and "3.00 GiB" in said and "granted" in said


def test_the_table_reads(model, device):
    lines = plan(model, device).table().splitlines()
    names = ["target's weights", "draft's weights", "CUDA and others", "largest step", "tapped states",
             "draft's scratch", "graphs", "KV cache", "granted"]  # fmt: skip
    assert [line[2:19].rstrip() for line in lines] == names
    assert lines[7].endswith("46.00 GiB  46 blocks of 16: 736 tokens")
    assert (
        len(plan(model, CPU, scratch_bytes=0, steps=None, draft_bytes=0, graph_bytes=0).table().splitlines())
        == 2
    )


def test_graphs_share_the_memory_of_the_largest():
    assert graph_reserve(STEPS, 0) == 0
    assert STEPS.decode < graph_reserve(STEPS, 1) < graph_reserve(STEPS, 9) < STEPS.decode + GIB


# -- running out ------------------------------------------------------------------------------------


def test_running_out_is_explained(device, model):
    with (
        pytest.raises(ConfigError) as caught,
        stage("loading the model", device, remedy="use a smaller one", plan=plan(model, device)),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    said = str(caught.value)
    assert "while loading the model" in said and "use a smaller one" in said
    assert "of 80.0 GiB 60.0 are free" in said and "KV cache" in said
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), ConfigError("no such file"), KeyError("x")])
def test_other_errors_are_left_alone(device, error):
    with pytest.raises(type(error)) as caught, stage("loading", device, remedy="none"):
        raise error
    assert caught.value is error


def test_a_stage_tells_what_it_took(monkeypatch, device):
    taken = iter([GIB, 4 * GIB])
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda device=None: next(taken))
    with stage("loading", device, remedy="none") as growth:
        assert growth.num_bytes == 0
    assert growth.num_bytes == 3 * GIB
    with stage("loading", CPU, remedy="none") as growth:
        pass
    assert growth.num_bytes == 0


# -- what a step takes ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "needs",
    [None, Needs(width=3, depth=3, taps=(Tap(0), Tap(2))), Needs(width=4, depth=2, shape=Shape.TREE)],
    ids=["plain", "tapped", "tree"],
)
@pytest.mark.parametrize(("max_tokens", "max_len"), [(40, 16), (32, 16), (9, 256)])
def test_the_largest_steps_run(model, needs, max_tokens, max_len, monkeypatch):
    computed = []
    forward, logits = type(model).forward, type(model).compute_logits

    def watched(self, ids, positions, meta, caches, taps):
        assert int(positions.max()) < max_len and not meta.write_slots.any()
        computed.append([len(ids), len(taps)])
        return forward(self, ids, positions, meta, caches, taps)

    def counted(self, hidden):
        computed[-1].append(len(hidden))
        return logits(self, hidden)

    monkeypatch.setattr(type(model), "forward", watched)
    monkeypatch.setattr(type(model), "compute_logits", counted)
    shape = LayerShape(model.config.num_kv_heads, model.config.head_dim, model.config.head_dim, model.dtype)
    prompts, decode = largest_steps(
        model, [shape] * 2, needs, block_size=8, max_tokens=max_tokens, max_rows=3, max_len=max_len
    )
    prompts()
    decode()
    draws, taps = 1 + (needs.width if needs else 0), len(needs.taps) if needs else 0
    assert computed == [
        [max_tokens, taps, min(max_tokens, 3 * draws)],
        [3 * draws, taps, 3 * draws],
    ]


def test_a_cpu_is_not_measured(model):
    limits = {"block_size": 16, "max_tokens": 1 << 40, "max_rows": 1 << 30, "max_len": 1 << 30}
    assert measure_steps(model, [], None, **limits) == StepMemory()


@on_gpu
def test_a_gpu_is_measured(tmp_path):
    path = tiny_checkpoint(tmp_path, max_position_embeddings=4096)
    files = resolve_model(path)
    model = load_model(files, dtype=torch.bfloat16, device=CUDA, max_model_len=4096)
    shape = LayerShape(2, 16, 16, torch.bfloat16)
    found = [
        measure_steps(model, [shape] * 2, needs, block_size=16, max_tokens=size, max_rows=64, max_len=4096)
        for size in (2048, 16384)
        for needs in (None, Needs(width=5, depth=5, taps=(Tap(1),)))
    ]
    assert all(steps.largest > 0 and steps.decode > 0 for steps in found)
    assert found[2].largest > found[0].largest
    assert (found[0].taps, found[1].taps) == (0, 2048 * 64 * 2)
    assert found[1].decode >= found[0].decode


@on_gpu
def test_an_engine_stays_within_its_grant(tmp_path):
    with LLM(tiny_checkpoint(tmp_path), gpu_memory_utilization=0.5, max_num_seqs=8) as llm:
        found: MemoryPlan = llm.memory_plan()
        assert found.step_bytes > 0 and found.granted_bytes > 0
        free, total = torch.cuda.mem_get_info()
        assert total - free <= found.granted_bytes
