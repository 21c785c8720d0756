"""Functions recorded once and replayed; the rows they are recorded for."""

from __future__ import annotations

import pytest
import torch
from specdecode.contract import Bucket
from specdecode.runner.graphs import Graphs, bucket_for, row_buckets

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize(
    ("most", "buckets"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (3, (1, 2, 3)),
        (16, (1, 2, 4, 8, 16)),
        (24, (1, 2, 4, 8, 16, 24)),
        (64, (1, 2, 4, 8, 16, 24, 32, 48, 64)),
        (100, (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 100)),
        (256, (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)),
    ],
)
def test_buckets(most, buckets):
    assert row_buckets(most) == buckets
    for rows in range(1, most + 1):
        bucket = bucket_for(rows, buckets)
        assert rows <= bucket and all(other < rows or other >= bucket for other in buckets)
    with pytest.raises(ValueError, match=f"{most + 1} rows"):
        bucket_for(most + 1, buckets)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_gpu)])
def test_off_means_run_as_it_is(device):
    graphs = Graphs(torch.device(device), enabled=False)
    calls = []
    run = graphs.capture(lambda: calls.append(1) or len(calls), Bucket(1, 1))
    assert not calls  # no warm-up either
    assert (run(), run()) == (1, 2)
    assert "no graphs" in graphs.report() and graphs.num_bytes == 0


def test_a_cpu_has_none():
    assert not Graphs(torch.device("cpu")).enabled


@on_gpu
def test_a_replay_computes_from_what_its_inputs_hold():
    device = torch.device("cuda")
    graphs = Graphs(device)
    inputs = torch.zeros(64, 256, device=device)
    state = torch.zeros(64, device=device)
    calls = []

    def step(rows):
        def run():
            calls.append(rows)
            state[:rows] += 1
            return (inputs[:rows] * 2).sum(1)

        return run

    replays = {rows: graphs.capture(step(rows), Bucket(rows, 1)) for rows in (64, 8, 1)}
    recorded = len(calls)
    state.zero_()
    for value in (1.0, 3.0):
        inputs.fill_(value)
        for rows, replay in replays.items():
            assert torch.equal(replay(), torch.full((rows,), 512 * value, device=device))
    assert len(calls) == recorded  # nothing but the graphs ran
    assert state.tolist() == [6.0] + [4.0] * 7 + [2.0] * 56
    assert graphs.captured.keys() == {Bucket(64, 1), Bucket(8, 1), Bucket(1, 1)}
    assert graphs.report().startswith("captured 3 graphs in ") and graphs.seconds > 0
    with pytest.raises(ValueError, match="already"):
        graphs.capture(step(8), Bucket(8, 1))
    graphs.clear()
    assert not graphs.captured


@on_gpu
def test_results_of_graphs_in_one_pool_stay_apart():
    """A later capture must not take the memory of an earlier one's result."""
    device = torch.device("cuda")
    graphs = Graphs(device)
    x = torch.arange(1 << 20, device=device, dtype=torch.float32)
    one = graphs.capture(lambda: (x + 1) * 2, "one")
    two = graphs.capture(lambda: (x + 3) * 4, "two")
    first, second = one(), two()
    assert torch.equal(first, (x + 1) * 2) and torch.equal(second, (x + 3) * 4)


@on_gpu
def test_a_function_that_waits_for_the_device_is_not_captured():
    device = torch.device("cuda")
    graphs = Graphs(device)
    x = torch.ones(4, device=device)
    with pytest.raises(RuntimeError):
        graphs.capture(lambda: x.sum().item(), "waits")
    assert not graphs.captured
    assert graphs.capture(lambda: x + 1, "works")().tolist() == [2.0] * 4


@on_gpu
def test_a_capture_that_the_driver_ends_leaves_nothing(caplog):
    """What torch's watch over synchronisations does not see is found by the capture, which is lost then."""
    device = torch.device("cuda")
    kept = torch.zeros(1, device=device)
    torch.rand(1, device=device)
    torch.cuda.empty_cache()
    before, stream, random = (
        torch.cuda.memory_reserved(),
        torch.cuda.current_stream(),
        torch.cuda.get_rng_state(),
    )
    graphs = Graphs(device)

    def fails():
        noise = torch.rand(64 << 20, device=device)
        torch.cuda.synchronize()
        return noise.sum()

    with graphs.attempt("this step"):
        graphs.capture(lambda: torch.zeros(1 << 20, device=device) + kept, "works")
        graphs.capture(fails, "fails")
    assert not graphs.enabled and not graphs.captured
    assert "this step cannot be captured" in caplog.text and "`torch.cuda.synchronize()`" in caplog.text
    assert torch.cuda.memory_reserved() - before < 16 << 20 and torch.cuda.current_stream() == stream
    torch.cuda.set_rng_state(random)
    assert torch.rand(8, device=device).unique().numel() > 1
    again = Graphs(device)
    replay = again.capture(lambda: torch.rand(1 << 20, device=device) + kept, "again")
    assert not torch.equal(replay().clone(), replay())
    again.clear()


@on_gpu
def test_a_capture_that_fails_in_python_leaves_nothing():
    device = torch.device("cuda")
    graphs, calls = Graphs(device), []

    def fails():
        calls.append(torch.ones(1 << 20, device=device).sum())
        if len(calls) == 3:
            raise KeyError("third")

    with pytest.raises(KeyError):
        graphs.capture(fails, "fails")
    assert not graphs.captured and not torch.cuda.is_current_stream_capturing()
    assert graphs.capture(lambda: torch.ones(4, device=device) + 1, "works")().tolist() == [2.0] * 4
