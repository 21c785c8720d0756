"""What ends a computation that waits for a rank which has ended: by fakes, as a GPU would behave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from multiprocessing import Pipe

import pytest
import torch
import torch.distributed as dist
from specdecode.api import assemble as assembling
from specdecode.contract import ConfigError
from specdecode.distributed import peers, processes
from specdecode.distributed.errors import WorkerDied
from specdecode.distributed.executors import LocalProcesses, Worker
from specdecode.distributed.group import SOLO, CollectiveGroup
from specdecode.distributed.lockstep import Leading
from specdecode.distributed.peers import RanksStore
from specdecode.distributed.processes import Workers
from specdecode.distributed.release import DeviceRelease
from specdecode.distributed.rendezvous import _from_a_thread
from specdecode.testing.lossless import Engine
from specdecode.testing.tiny import tiny_checkpoint

SOON = 10.0


class Killed:
    """A process that was."""

    pid = 4242

    def __init__(self):
        self.killed = 0

    def poll(self):
        return -signal.SIGKILL

    def kill(self):
        self.killed += 1

    def wait(self, timeout=None):
        return -signal.SIGKILL


class Kernel:
    """What a rank waits for: ended by an abort, or by nothing but the end of its device."""

    def __init__(self, obeys, graphs):
        self.ended, self.graphs_gone = threading.Event(), threading.Event()
        self.obeys, self.calls = obeys, []
        if not graphs:
            self.graphs_gone.set()

    def call_off(self):
        self.calls.append("call off")
        if self.obeys:
            self.ended.set()
        self.graphs_gone.wait()  # as ncclCommAbort does

    def stop(self):
        self.calls.append("stop")
        self.ended.set()

    def free(self):
        self.calls.append("free")


@pytest.fixture
def lost(monkeypatch):
    """Makes rank 0's side of two ranks, and what ends the other."""
    monkeypatch.setattr(processes, "_RELEASING", 0.3)
    monkeypatch.setattr(processes, "_FREEING", 0.3)

    def make(kernel):
        (_, calls), (reports, reporting) = Pipe(duplex=False), Pipe(duplex=False)
        workers = Workers([Worker(1, Killed(), calls, reports)], ["setup"])
        workers.on_loss(kernel)
        return Leading(SOLO, workers), reporting.close

    return make


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("obeys", [True, False])
def test_a_kernel_that_waits_for_a_lost_rank_is_ended(lost, obeys, graphs):
    kernel = Kernel(obeys, graphs)
    leading, end = lost(kernel)
    threading.Timer(0.1, end).start()
    started = time.monotonic()
    with pytest.raises(WorkerDied, match=r"rank 1 .* was killed by signal 9") as raised, leading.together():
        assert kernel.ended.wait(SOON)  # the main thread, in the driver
        if not obeys:
            raise RuntimeError("CUDA error: device-side assert triggered")
    assert ("in another process" in str(raised.value)) == (not obeys)
    leading.close()
    assert time.monotonic() - started < SOON
    assert kernel.calls == ["call off", *["stop"] * (not obeys), "free"]
    with pytest.raises(WorkerDied):
        leading.announce("step")


def test_a_group_that_was_called_off_tells_what_became_of_the_worker(lost):
    """Between two kernels a rank learns of a loss by its next collective alone, which knows no reason."""
    kernel = Kernel(obeys=True, graphs=False)
    leading, end = lost(kernel)
    end()
    with pytest.raises(WorkerDied, match=r"rank 1 .* was killed by signal 9"), leading.together():
        assert kernel.ended.wait(SOON)
        raise WorkerDied("another rank has ended")
    leading.close()


def test_what_does_not_wait_is_not_stopped(lost):
    kernel = Kernel(obeys=False, graphs=False)
    leading, end = lost(kernel)
    end()
    deadline = time.monotonic() + SOON
    while "call off" not in kernel.calls and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.5)
    assert kernel.calls == ["call off"]
    with pytest.raises(WorkerDied):
        leading.announce("step")
    leading.close()


def test_meeting_ends_with_what_is_noticed_meanwhile():
    def check():
        raise WorkerDied("rank 1 has ended")

    with pytest.raises(WorkerDied, match="rank 1"):
        _from_a_thread(lambda: time.sleep(SOON), check)
    assert _from_a_thread(lambda: 5, lambda: None) == 5
    with pytest.raises(TimeoutError, match="own"):
        _from_a_thread(lambda: (_ for _ in ()).throw(TimeoutError("its own")), lambda: None)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    torch.set_num_threads(1)
    return tiny_checkpoint(tmp_path_factory.mktemp("loss") / "target", output_scale=0.2)


@pytest.mark.parametrize("when", ["before it meets", "while it loads"])
def test_a_worker_that_dies_during_the_start(target, monkeypatch, when):
    pids = []
    start, load = LocalProcesses.start, assembling._load

    def started(self, ranks):
        workers = start(self, ranks)
        pids.extend(worker.process.pid for worker in workers)
        if when == "before it meets":
            os.kill(pids[0], signal.SIGKILL)
        return workers

    def loading(*parts):
        os.kill(pids[0], signal.SIGKILL)
        return load(*parts)

    monkeypatch.setattr(LocalProcesses, "start", started)
    if when == "while it loads":
        monkeypatch.setattr(assembling, "_load", loading)
    before = time.monotonic()
    with pytest.raises(WorkerDied, match=r"rank 1 .* signal 9"):
        Engine(target, tensor_parallel_size=2)
    assert time.monotonic() - before < 3 * SOON


HANGS = """
import sys, time
from multiprocessing.connection import Connection
from specdecode.distributed import worker
worker._GRACE = 0.2
worker._serve = lambda inbox: time.sleep(60)  # in a collective that never ends
worker.serve(Connection(int(sys.argv[1]), writable=False), Connection(int(sys.argv[2]), readable=False))
"""


@pytest.mark.skipif(not hasattr(__import__("select"), "poll"), reason="looks for hung-up pipes by poll")
def test_a_worker_that_hangs_ends_when_rank_0_hangs_up():
    (calls, calling), (reports, reporting) = Pipe(duplex=False), Pipe(duplex=False)
    fds = (calls.fileno(), reporting.fileno())
    process = subprocess.Popen([sys.executable, "-c", HANGS, *map(str, fds)], pass_fds=fds)
    calls.close()
    reporting.close()
    calling.send("not read")
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.0)
    calling.close()
    assert process.wait(SOON) == 1
    reports.close()


# -- memory that ranks share: what of it can be seen without a GPU ----------------------------------------
def test_ranks_that_counted_differently_meet():
    """As torch's rendezvous writes: numbers go on through the life of a process."""
    shared = dist.HashStore()
    stores = [RanksStore(dist.PrefixStore("peers", shared)) for _ in range(2)]
    seen = [dist.PrefixStore("", store) for store in stores]  # calls ours from C++
    first = (0, 7)
    for exchange in range(3):
        for rank in range(2):
            seen[rank].set(f"CUDASymmetricMemory/{first[rank] + exchange}/{rank}", f"{rank}, {exchange}")
        for rank in range(2):
            keys = [f"CUDASymmetricMemory/{first[rank] + exchange}/{other}" for other in range(2)]
            wanted = [f"{other}, {exchange}".encode() for other in range(2)]
            assert [seen[rank].get(key) for key in keys] == wanted
            assert seen[rank].multi_get(keys) == wanted
    seen[0].set("other", b"kept")
    assert seen[1].get("other") == b"kept"
    with pytest.raises(Exception, match=r"(?i)timeout"):
        stores[0].wait(["nobody's"], timedelta(seconds=0.05))


def test_what_the_environment_chooses(monkeypatch, target):
    assert peers.wanted()
    monkeypatch.setenv(peers.SWITCH, "nccl")
    assert not peers.wanted()
    monkeypatch.setenv(peers.SWITCH, "fast")
    with pytest.raises(ConfigError, match="SPECDECODE_ALL_REDUCE"):
        Engine(target, tensor_parallel_size=2)


class FakePeers:
    """Adds what two ranks have as memory that they share does."""

    def __init__(self, other, rank):
        self.other, self.rank = other, rank
        self.sums = 0

    def takes(self, x):
        return x.numel() <= 64

    def sum(self, x):
        self.sums += 1
        return x + self.other[: x.numel()].view(x.shape)


class FakeBackend:
    def rank(self):
        return 0

    def size(self):
        return 2

    def _allgather_base(self, out, x, options):
        out.view(2, -1)[0], out.view(2, -1)[1] = x, 2 * x


def test_small_sums_are_made_in_shared_memory():
    group = CollectiveGroup(FakeBackend(), SOLO, torch.device("cpu"))
    small, large = torch.arange(8.0).view(2, 4), torch.arange(128.0)
    assert torch.equal(group.all_reduce(small), 3 * small)
    group.peers = FakePeers(2 * torch.arange(64.0), 0)
    assert torch.equal(group.all_reduce(small), 3 * small)
    assert torch.equal(group.terms(small), 3 * small[None])
    assert group.peers.sums == 2
    assert torch.equal(group.all_reduce(large), 3 * large)
    assert group.peers.sums == 2


class HeldBackend(FakeBackend):
    """Whom an abort keeps until the graphs are gone, and everybody who asks meanwhile."""

    def __init__(self):
        self.lock, self.graphs_gone = threading.Lock(), threading.Event()

    def abort(self):
        with self.lock:
            self.graphs_gone.wait(SOON)

    def _allgather_base(self, *args):
        with self.lock:
            super()._allgather_base(*args)


def test_nobody_asks_a_backend_that_is_aborted(monkeypatch):
    """Between two kernels, compiling say, a rank knows of no loss: its next collective must not wait."""
    backend = HeldBackend()
    group = CollectiveGroup(backend, SOLO, torch.device("cpu"))
    release = DeviceRelease.__new__(DeviceRelease)
    release._group, release._backend, release._peers, release._called_off = group, backend, None, False
    group.all_reduce(torch.ones(4))
    calling = processes._apart(release.call_off)
    deadline = time.monotonic() + SOON
    while not backend.lock.locked() and time.monotonic() < deadline:
        time.sleep(0.01)
    for ask in (group.all_reduce, group.all_gather, group.broadcast):
        with pytest.raises(WorkerDied, match="another rank"):
            ask(torch.ones(2, 2))
    with pytest.raises(WorkerDied, match="another rank"):
        group.least(1)
    backend.graphs_gone.set()
    calling.join(SOON)
    assert not calling.is_alive()


def test_without_shared_memory_all_ranks_go_without(caplog, monkeypatch):
    """No GPU here: the set-up raises, and says so in one line."""
    group = CollectiveGroup(FakeBackend(), SOLO, torch.device("cpu"))
    monkeypatch.setattr(CollectiveGroup, "least", lambda self, value: int(value))
    caplog.set_level("INFO", "specdecode")
    assert peers.share_memory(group, FakeBackend(), dist.HashStore(), torch.device("cuda", 0)) is None
    assert "sums over the ranks are NCCL's alone" in caplog.text
    monkeypatch.setenv(peers.SWITCH, "nccl")
    caplog.clear()
    assert peers.share_memory(group, FakeBackend(), dist.HashStore(), torch.device("cuda", 0)) is None
    assert not caplog.text
