"""The ranks of one model that is sharded over several devices or machines, as Ray actors.

A placement group holds a bundle for each rank. Every actor has in its environment what
``torch.distributed`` reads (``env://``): MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE, LOCAL_RANK,
LOCAL_WORLD_SIZE. What the ranks do is the caller's: ``run`` calls a function in all of them.
"""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.util.placement_group import (
    PlacementGroup,
    get_current_placement_group,
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from specdecode.contract import SpecdecodeError, Unsupported

#: Seconds between two looks at ranks that have not answered.
LOOK_AGAIN = 0.5
#: Seconds to wait for room in the cluster.
ROOM_TIMEOUT = 300.0


class WorkerLost(SpecdecodeError):
    """A rank died: what all ranks were doing together cannot be finished."""


class _Worker:
    """A rank."""

    def place(self) -> tuple[str, str, int]:
        """Its machine's id and address, and a free port there."""
        with socket.socket() as listener:
            listener.bind(("", 0))
            port = listener.getsockname()[1]
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), port

    def set_environment(self, variables: Mapping[str, str]) -> None:
        os.environ.update(variables)

    def run(self, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        return function(*args)


class WorkerGroup:
    """Ranks 0 to ``size - 1``. As a context manager it ends them."""

    def __init__(self, actors: Sequence[Any], group: PlacementGroup, *, owned: bool) -> None:
        """
        Args:
            owned: the placement group is this group's own, and removed with it.
        """
        self._actors = list(actors)
        self._group = group
        self._owned = owned

    @property
    def size(self) -> int:
        return len(self._actors)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float | None = None) -> list[Any]:
        """``function(*args)`` in every rank at once; the results by rank.

        Raises:
            WorkerLost: a rank died meanwhile. The others may wait for it for ever: shut the group down.
            TimeoutError: it took longer than ``timeout`` seconds.
            Exception: what ``function`` raised in the first rank that ended with an exception.
        """
        rank_of = {actor.run.remote(function, args): rank for rank, actor in enumerate(self._actors)}
        results: dict[int, Any] = {}
        deadline = None if timeout is None else time.monotonic() + timeout
        while len(results) < self.size:
            left = [ref for ref, rank in rank_of.items() if rank not in results]
            done, _ = ray.wait(left, num_returns=1, timeout=LOOK_AGAIN)
            for ref in done:
                results[rank_of[ref]] = self._result(ref, rank_of[ref])
            if not done and deadline is not None and time.monotonic() > deadline:
                missing = sorted(rank_of[ref] for ref in left)
                raise TimeoutError(f"ranks {missing} have not ended within {timeout:g} seconds")
        return [results[rank] for rank in range(self.size)]

    @staticmethod
    def _result(ref: Any, rank: int) -> Any:
        try:
            return ray.get(ref)
        except RayActorError as error:
            raise WorkerLost(f"rank {rank} died: {error}") from error

    def shutdown(self) -> None:
        """End all ranks, and give back what was booked for them. May be called twice."""
        for actor in self._actors:
            ray.kill(actor)
        if self._owned:
            remove_room(self._group)
        self._owned = False

    def __enter__(self) -> WorkerGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()


def place_workers(
    world_size: int,
    *,
    bundle: Mapping[str, float] | None = None,
    strategy: str = "PACK",
    runtime_env: Mapping[str, Any] | None = None,
    timeout: float = ROOM_TIMEOUT,
) -> WorkerGroup:
    """Start the ranks of one model.

    Inside an actor that has a placement group with bundles enough (a replica of Ray Serve, say), they go
    into that one; else into one of their own.

    Args:
        bundle: what Ray books for a rank; None: a CPU and a GPU.
        strategy: ``PACK`` keeps ranks on few machines, ``STRICT_SPREAD`` puts each on another one.
        timeout: seconds to wait for room.

    Raises:
        Unsupported: there is no room within ``timeout`` seconds.
    """
    booked = {"CPU": 1.0, "GPU": 1.0} if bundle is None else dict(bundle)
    group, owned = get_current_placement_group(), False
    if group is None or group.bundle_count < world_size:
        group, owned = make_room([booked] * world_size, strategy, timeout), True
    actors = [actor_in(group, rank, _Worker, booked, runtime_env) for rank in range(world_size)]
    workers = WorkerGroup(actors, group, owned=owned)
    try:
        _introduce(actors)
    except BaseException:
        workers.shutdown()
        raise
    return workers


def make_room(bundles: Sequence[Mapping[str, float]], strategy: str, timeout: float) -> PlacementGroup:
    """A placement group that has its room; :func:`remove_room` gives it back.

    Raises:
        Unsupported: there is none within ``timeout`` seconds.
    """
    group = placement_group([dict(bundle) for bundle in bundles], strategy=strategy)
    if not group.wait(timeout):
        remove_placement_group(group)
        raise Unsupported(
            f"{len(bundles)} workers with {dict(bundles[-1])} each ({strategy}) found no room within "
            f"{timeout:g} seconds; the cluster has {ray.cluster_resources()}: add machines, or ask for less"
        )
    return group


def remove_room(group: PlacementGroup) -> None:
    if ray.is_initialized():
        remove_placement_group(group)


def actor_in(
    group: PlacementGroup,
    index: int,
    cls: type,
    booked: Mapping[str, float],
    runtime_env: Mapping[str, Any] | None = None,
) -> Any:
    """An actor in bundle ``index`` of a placement group, which is not started again when it dies."""
    remote: Any = ray.remote(cls)
    others = {name: amount for name, amount in booked.items() if name not in ("CPU", "GPU")}
    return remote.options(
        num_cpus=booked.get("CPU", 0),
        num_gpus=booked.get("GPU", 0),
        resources=others,
        runtime_env=runtime_env,
        max_restarts=0,
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
    ).remote()


def _introduce(actors: Sequence[Any]) -> None:
    """Tell every rank where rank 0 is, and who it is itself."""
    places = ray.get([actor.place.remote() for actor in actors])
    per_node = Counter(node for node, _, _ in places)
    seen: Counter[str] = Counter()
    _, address, port = places[0]
    told = []
    for rank, (actor, (node, _, _)) in enumerate(zip(actors, places, strict=True)):
        variables = {
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "RANK": str(rank),
            "WORLD_SIZE": str(len(actors)),
            "LOCAL_RANK": str(seen[node]),
            "LOCAL_WORLD_SIZE": str(per_node[node]),
        }
        seen[node] += 1
        told.append(actor.set_environment.remote(variables))
    ray.get(told)
