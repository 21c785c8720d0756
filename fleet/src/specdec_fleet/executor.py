"""``distributed_executor_backend="ray"``: one model over the GPUs of several machines, a Ray actor for each.

Rank 0 is the engine's own process. Inside a replica of Ray Serve all ranks lie in its placement group;
elsewhere the executor makes one, whose first bundle lies on this machine and stands for rank 0.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, get_current_placement_group
from specdecode.contract import ConfigError
from specdecode.distributed.errors import WorkerDied
from specdecode.distributed.executors import Worker, check_kind

from .workers import ROOM_TIMEOUT, actor_in, make_room, remove_room

#: Seconds that an actor has to be there, with its machine's imports.
START_TIMEOUT = 300.0


class RankActor:
    """Another rank: an actor that follows rank 0 through two connections."""

    def listen(self, key: bytes) -> tuple[str, int]:
        """Where it is to be called, by whoever has ``key``."""
        self._listener = Listener((ray.util.get_node_ip_address(), 0), authkey=key)
        address: tuple[str, int] = self._listener.address  # type: ignore[assignment]
        return address

    def pid(self) -> int:
        return os.getpid()

    def gpus(self) -> list[int]:
        """Ray's numbers of the GPUs that are booked for it."""
        return [int(gpu) for gpu in ray.get_gpu_ids()]

    def follow(self) -> int:
        """Serve as a rank until rank 0 ends; its status."""
        from specdecode.distributed.worker import serve

        calls, reports = self._listener.accept(), self._listener.accept()
        self._listener.close()
        return serve(calls, reports)


class ActorProcess:
    """The process of an actor, as :class:`subprocess.Popen` has processes."""

    def __init__(self, actor: Any, pid: int, ended: Any, done: Callable[[], None]) -> None:
        """
        Args:
            ended: reference to the status with which it ends.
            done: called once when it has.
        """
        self.pid = pid
        self._actor = actor
        self._ended = ended
        self._done = done
        self._status: int | None = None

    def poll(self) -> int | None:
        """Its status, negative for a signal; None while it runs."""
        if self._status is None and ray.is_initialized():
            ready, _ = ray.wait([self._ended], timeout=0)
            if ready:
                self._settle()
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        """Its status.

        Raises:
            subprocess.TimeoutExpired: it has not ended within ``timeout`` seconds.
        """
        if self._status is None and ray.is_initialized():
            ready, _ = ray.wait([self._ended], timeout=timeout)
            if not ready:
                raise subprocess.TimeoutExpired("rank", timeout or 0.0)
            self._settle()
        return self._status or 0

    def kill(self) -> None:
        if ray.is_initialized():
            ray.kill(self._actor)

    def _settle(self) -> None:
        try:
            self._status = int(ray.get(self._ended))
        except RayError:
            self._status = -signal.SIGKILL
        self.kill()  # an actor lives on when its method has ended
        self._done()


class RayExecutor:
    """The ranks of an engine as actors; see :class:`specdecode.distributed.executors.Executor`."""

    name = "ray"

    def __init__(self) -> None:
        self._own_gpu = 0

    @property
    def host(self) -> str:
        return str(ray.util.get_node_ip_address())

    def device_of(self, rank: int) -> int:
        """An actor sees the GPUs that are booked for it and no others."""
        return self._own_gpu if rank == 0 else 0

    def check(self, ranks: int, device: str) -> None:
        check_kind(ranks, device)
        if not ray.is_initialized():
            raise ConfigError(
                "distributed_executor_backend='ray' wants a Ray cluster: call ray.init(address='auto') "
                "before, or leave it out for the devices of this machine"
            )
        self._bundle = {"CPU": 1.0, **({"GPU": 1.0} if device.startswith("cuda") else {})}

    def start(self, ranks: int) -> Sequence[Worker]:
        room = get_current_placement_group()
        inside = room is not None and room.bundle_count >= ranks
        if inside:
            assert room is not None
            done = _Countdown(ranks - 1, lambda: None)
            bundle = room.bundle_specs[1]
            self._bundle = {name: bundle[name] for name in ("CPU", "GPU") if name in bundle}
        else:
            here = {f"node:{self.host}": 0.001}
            room = make_room([self._bundle | here, *[self._bundle] * (ranks - 1)], "PACK", ROOM_TIMEOUT)
            done = _Countdown(ranks - 1, lambda: remove_room(room))
        try:
            if not inside and self._bundle.get("GPU"):
                self._own_gpu = self._gpu_of_first(room)
            return self._start_all(room, ranks, done)
        except BaseException:
            if not inside:
                remove_room(room)
            raise

    def _start_all(self, room: PlacementGroup, ranks: int, done: _Countdown) -> list[Worker]:
        key = secrets.token_bytes(16)
        actors = [actor_in(room, rank, RankActor, self._bundle) for rank in range(1, ranks)]
        try:
            addresses = ray.get([actor.listen.remote(key) for actor in actors], timeout=START_TIMEOUT)
            pids = ray.get([actor.pid.remote() for actor in actors])
            workers = []
            for rank, (actor, address, pid) in enumerate(zip(actors, addresses, pids, strict=True), start=1):
                process = ActorProcess(actor, pid, actor.follow.remote(), done.one)
                calls, reports = _call(address, key), _call(address, key)
                workers.append(Worker(rank, process, calls, reports))
            return workers
        except (RayError, OSError, EOFError, TimeoutError) as error:
            for actor in actors:
                ray.kill(actor)
            raise WorkerDied(f"an actor of the ranks ended before all had met: {error}") from error

    def _gpu_of_first(self, room: PlacementGroup) -> int:
        """The GPU of this machine that Ray booked for rank 0, which is no actor."""
        probe = actor_in(room, 0, RankActor, self._bundle)
        (gpu,) = ray.get(probe.gpus.remote(), timeout=START_TIMEOUT)
        ray.kill(probe)
        return int(gpu)


class _Countdown:
    """Calls ``then`` when :meth:`one` was called ``count`` times."""

    def __init__(self, count: int, then: Callable[[], None]) -> None:
        self._left = count
        self._then = then
        self._lock = threading.Lock()

    def one(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left == 0:
                self._then()


def _call(address: tuple[str, int], key: bytes) -> Connection:
    connection = Client(address, authkey=key)
    assert isinstance(connection, Connection)
    return connection
