"""What a trace says of a step, on traces written by hand; and the clock of the stages."""

import itertools
from types import SimpleNamespace

import pytest
from specdecode.bench.stages import DRAFT, HOST, TARGET, VERIFY, Stages, watched
from specdecode.bench.timeline import read_timeline

DECIDING = ("next_inputs_kernel", "scores_kernel", "accept_kernel")
STEP = ("next_inputs_kernel", "qkv", "down", "scores_kernel", "accept_kernel", "match")


class Trace:
    """Builds the JSON of a trace; microseconds."""

    def __init__(self):
        self.events = [{"ph": "M", "name": "process_name"}]
        self._correlations = itertools.count(1)

    def range(self, name, start, end):
        self._add("user_annotation", f"specdecode:{name}", start, end)

    def wait(self, start, end):
        self._add("cuda_runtime", "cudaEventSynchronize", start, end, correlation=0)

    def launch(self, at, *works, cat="kernel"):
        """One call at ``at``; ``works`` are (name, start, end) on the device."""
        correlation = next(self._correlations)
        self._add("cuda_driver", "cuLaunchKernelEx", at, at + 1, correlation=correlation)
        for name, start, end in works:
            self._add(cat, name, start, end, correlation=correlation)

    def _add(self, cat, name, start, end, **args):
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start, "args": args}
        )

    def read(self, drafting=True):
        return read_timeline({"traceEvents": self.events[::-1]}, DECIDING, drafting=drafting)


def in_order(names, start, length, pause):
    """Kernels of ``length`` one after the other, ``pause`` between them."""
    return [
        (name, start + i * (length + pause), start + i * (length + pause) + length)
        for i, name in enumerate(names)
    ]


def test_kernels_belong_to_the_stage_that_launched_them():
    trace = Trace()
    trace.range("step", 100, 200)
    trace.range("target", 100, 150)
    trace.range("verify", 130, 140)  # inside the target's
    trace.range("verify", 100, 105)  # begins with it
    trace.range("draft", 140, 140)  # takes no time
    trace.range("draft", 160, 190)
    trace.launch(110, ("a", 120, 130))
    trace.launch(132, ("b", 130, 137))
    trace.launch(145, ("c", 150, 160))  # nothing runs from 137 to 150, and nobody waits
    trace.launch(170, ("d", 171, 180))
    trace.wait(160, 168)
    trace.launch(195, ("copy", 180, 184), cat="gpu_memcpy")  # the host's own
    timeline = trace.read()
    assert (timeline.steps, timeline.total) == (1, 64)
    # from 160 to 171: 8 waiting, 3 computing
    assert timeline.stages == {"target": 20, "verify": 7, "draft": 9, "host": 13 + 3 + 4, "idle": 8}
    assert sum(timeline.stages.values()) == timeline.total


@pytest.mark.parametrize("drafting", [True, False])
def test_a_captured_step_is_told_apart_by_its_order(drafting):
    trace = Trace()
    for step in range(2):
        start = 1000 * step
        trace.range("step", start, start + 50)
        trace.range("target", start + 1, start + 3)
        trace.launch(start + 2, *in_order(STEP, start + 10, length=100, pause=5))
        trace.wait(start + 20, start + 40)
    timeline = trace.read(drafting)
    assert timeline.steps == 2
    # A pause inside a captured step is that of the kernel behind it. The first kernel has none before it.
    decided = 2 * (100 + 105 + 105)
    assert timeline.stages["target"] == 2 * 210
    assert timeline.stages["verify"] == decided + (0 if drafting else 2 * 105)
    assert timeline.stages["draft"] == (2 * 105 if drafting else 0)
    # From the first step's end, 10 + 6 * 105 - 5, to the second's start; the host computes meanwhile.
    assert timeline.stages["host"] == 1010 - 635 and timeline.stages["idle"] == 0


def test_kernels_that_overlap_count_once():
    trace = Trace()
    trace.range("step", 0, 10)
    trace.range("target", 0, 9)
    trace.launch(1, ("a", 10, 30), ("b", 25, 40), ("c", 28, 35))
    assert trace.read().stages["target"] == trace.read().total == 30


def test_steps_with_prompt_tokens_are_left_out():
    trace = Trace()
    trace.range("step", 0, 50)
    trace.range("prefill", 1, 40)
    trace.launch(2, ("prompt", 3, 90))
    trace.range("step", 60, 80)
    trace.range("target", 61, 70)
    trace.launch(62, ("a", 95, 100))
    timeline = trace.read()
    assert (timeline.steps, timeline.total, timeline.stages["target"]) == (1, 5, 5)


def test_a_trace_without_kernels_says_nothing():
    trace = Trace()
    assert trace.read() is None
    trace.range("step", 0, 9)
    trace.launch(2)
    assert trace.read() is None


# -- the clock ----------------------------------------------------------------------------------------
def test_time_is_charged_to_the_innermost_stage():
    clock = SimpleNamespace(now=0.0)

    class Core:
        def step(self):
            clock.now += 1
            self._forward(SimpleNamespace(rows=[SimpleNamespace(prefill=self.prefill)]))
            self._propose()

        def _forward(self, plan):
            clock.now += 10
            self._verify()
            clock.now += 20

        def _verify(self):
            clock.now += 3

        def _propose(self):
            clock.now += 7

    core = Core()
    stages = Stages(lambda: clock.now)
    with watched(core, stages):
        for core.prefill in (True, False):
            clock.now += 100  # between two steps
            core.step()
    assert [step.prefill for step in stages.steps] == [True, False]
    for step in stages.steps:
        assert step.seconds == {HOST: 101, TARGET: 30, VERIFY: 3, DRAFT: 7}
    core.step()
    assert len(stages.steps) == 2 and "step" not in vars(core)


def test_what_was_wrapped_is_put_back_after_a_failure():
    from specdec_kernels import sampling

    class Core:
        def step(self):
            raise RuntimeError("no")

    before = sampling.draw_tokens
    core = Core()
    stages = Stages()
    with pytest.raises(RuntimeError), watched(core, stages):
        assert sampling.draw_tokens is not before
        core.step()
    assert sampling.draw_tokens is before and "step" not in vars(core) and len(stages.steps) == 1
