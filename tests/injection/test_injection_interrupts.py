"""Ctrl-C in ``generate``, wherever it strikes: nothing is left behind and the next call is served."""

from __future__ import annotations

import itertools
import signal
import sys
import threading

import pytest
from specdecode.api.interrupts import held_back_interrupts

ORDERS = pytest.mark.parametrize("order", ["plain", "late"])


@pytest.fixture(autouse=True)
def interruptible():
    """A process started in the background of a shell ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupted(rig, asks):
    with pytest.raises(KeyboardInterrupt):
        rig.generate(asks)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    rig.drain()
    core = rig.core
    assert not core.outputs and not core.has_unfinished
    assert not rig.llm.llm_engine.has_unfinished_requests()
    core.scheduler.pool.check([])


class LineTrap:
    """Raises SIGINT at one of the lines of the engine, counted from its start."""

    FOLDERS = ("specdecode/engine/", "specdecode/kv/", "specdecode/api/engine.py", "specdecode/api/llm.py")

    def __init__(self, line):
        self.left = line
        self.where = None

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self.trace)
        return self

    def __exit__(self, *error):
        sys.settrace(self.before)

    def trace(self, frame, event, argument):
        if not any(folder in frame.f_code.co_filename for folder in self.FOLDERS):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                signal.raise_signal(signal.SIGINT)
        return self.trace


@ORDERS
@pytest.mark.parametrize("method", ["none", "self-draft"])
def test_at_any_line(lab, method, order):
    """From queueing the first request to delivering the last token; the signal is real."""
    asks = lab.mixed(4, max_tokens=6)
    with lab.rig(method, asks, order, num_gpu_blocks_override=40) as rig:
        if rig.recording:
            rig.stateless = False
        places = set()
        for line in (400, 700, 1100, 1500, 2100, 2600, 3300, 3700, 4444):
            with LineTrap(line) as trap:
                interrupted(rig, asks)
            places.add(trap.where)
        assert len(places) > 5
        rig.generate(asks)


def raising(error):
    def processor(output_ids, logits):
        if len(output_ids) == 3:
            raise error
        return logits

    return processor


@ORDERS
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_raised_by_a_logits_processor(lab, order, error):
    asks = lab.mixed(4)
    with lab.rig("self-draft", asks, order) as rig:
        params = [ask.params.clone(logits_processors=[raising(error)]) for ask in asks]
        prompts = [{"prompt_token_ids": ask.prompt} for ask in asks]
        with pytest.raises(error):
            rig.llm.generate(prompts, params, use_tqdm=False)
        rig.drain()
        rig.core.scheduler.pool.check([])
        rig.generate(asks)


@ORDERS
@pytest.mark.parametrize("hook", ["on_add", "on_commit", "on_preempt", "on_finish", "propose"])
@pytest.mark.parametrize("at", [0, 2])
def test_raised_in_a_hook_of_the_proposer(lab, monkeypatch, hook, order, at):
    asks = lab.mixed(6, max_tokens=20)
    with lab.rig("ngram", asks, order, num_gpu_blocks_override=26, max_model_len=96, recorded=False) as rig:
        proposer = rig.core.drafting.proposer.proposer
        work, calls = getattr(proposer, hook), itertools.count()

        def wrapped(*args):
            if next(calls) == at:
                raise KeyboardInterrupt
            return work(*args)

        with monkeypatch.context() as patch:
            patch.setattr(proposer, hook, wrapped)
            interrupted(rig, asks)
        rig.generate(asks)


def test_a_second_one_is_raised_at_once():
    reached = []
    with pytest.raises(KeyboardInterrupt), held_back_interrupts() as check:
        signal.raise_signal(signal.SIGINT)
        reached.append("held back")
        signal.raise_signal(signal.SIGINT)
        reached.append("not held back")
        check()
    assert reached == ["held back"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_it_is_raised_by_the_check_and_at_the_end():
    with pytest.raises(KeyboardInterrupt), held_back_interrupts() as check:
        check()
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            check()
        check()  # once
        signal.raise_signal(signal.SIGINT)


def test_handlers_of_others_and_other_threads_are_left_alone(lab):
    mine = []
    before = signal.signal(signal.SIGINT, lambda *args: mine.append(args))
    try:
        with held_back_interrupts() as check:
            signal.raise_signal(signal.SIGINT)
            check()
        assert len(mine) == 1
    finally:
        signal.signal(signal.SIGINT, before)
    asks = lab.mixed(2)
    with lab.rig("none", asks) as rig:
        worker = threading.Thread(target=lambda: mine.append(rig.generate(asks)))
        worker.start()
        worker.join()
        assert len(mine) == 2


@ORDERS
def test_steps_go_on_after_an_interrupt_in_propose(lab, monkeypatch, order):
    """Who drives the engine by hand and catches it gets every token, told once."""
    asks = lab.mixed(6, max_tokens=12)
    with lab.rig("ngram", asks, order, recorded=False) as rig:
        proposer = rig.core.drafting.proposer.proposer
        work, calls, struck = proposer.propose, itertools.count(), 0

        def wrapped(*args):
            if next(calls) % 2:
                raise KeyboardInterrupt
            return work(*args)

        monkeypatch.setattr(proposer, "propose", wrapped)
        for number, ask in enumerate(asks):
            rig.add(f"q{number}", ask)
        finished = {}
        while rig.llm.llm_engine.has_unfinished_requests():
            try:
                finished |= rig.step()
            except KeyboardInterrupt:
                struck += 1
        assert struck > 3
        for number, ask in enumerate(asks):
            rig.compare(ask, finished[f"q{number}"])
