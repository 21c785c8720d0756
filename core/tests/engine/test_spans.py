"""Times of forwards: the device's, whatever the host does meanwhile."""

from __future__ import annotations

import pytest
import torch
from specdecode.engine import loop, spans
from specdecode.testing.lossless import Engine, requests
from specdecode.testing.tiny import tiny_checkpoint


class FakeEvent:
    """Of a device whose clock and progress are set by hand."""

    now, reached = 0.0, -1.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = FakeEvent.now

    def query(self):
        return FakeEvent.reached >= self.at

    def elapsed_time(self, end):
        return end.at - self.at


@pytest.fixture
def device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(FakeEvent, "now", 100.0)
    monkeypatch.setattr(FakeEvent, "reached", 0.0)
    return torch.device("cuda")


def test_a_span_is_the_devices_time(device):
    span = spans.Span(device)
    FakeEvent.now = 350.0
    span.end()
    assert span.seconds() is None
    FakeEvent.reached = 350.0
    assert span.seconds() == pytest.approx(0.25)
    assert span.launching < 0.25


def test_without_a_device_it_is_the_hosts():
    span = spans.Span(torch.device("cpu"))
    span.end()
    assert span.done is None
    assert span.seconds() == span.launching > 0


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    torch.set_num_threads(1)
    return tiny_checkpoint(tmp_path_factory.mktemp("spans") / "target")


@pytest.mark.parametrize("order", ["plain", "late"])
def test_every_step_is_counted(target, order):
    engine = Engine(target, order=order)
    engine(*requests(2))
    assert engine.metric("specdecode:target_seconds") > 0
    assert engine.metric("specdecode:verify_seconds") > 0


def test_the_wait_for_a_forward_is_no_verification(target, monkeypatch):
    class Long(spans.Span):
        def seconds(self):
            return self.launching + 3600.0

    monkeypatch.setattr(loop, "Span", Long)
    engine = Engine(target)
    engine(*requests(2))
    steps = engine.metric("specdecode:steps")
    assert engine.metric("specdecode:target_seconds") == pytest.approx(3600.0 * steps, rel=1e-3)
    assert engine.metric("specdecode:verify_seconds") == 0.0
