"""A fleet as an application of Ray Serve: replicas, and the door before them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from specdecode.api.args import EngineArgs

from .client import Tolerance
from .config import FleetArgs, FleetConfig
from .door import Door
from .replica import Replica

#: Attempts of Ray Serve to start a replica before it gives the deployment up.
START_ATTEMPTS = 3
#: Signs of life of a replica in the time after which it would count as lost.
PULSES = 6
#: Enough of what only the head of a cluster has.
_HEAD = {"node:__internal_head__": 0.001}


def build(args: Mapping[str, Any]) -> Application:
    """The application; ``import_path: specdec_fleet:build`` of a Ray Serve config file.

    Args:
        args: ``model``, and as mappings ``engine`` (keywords of ``AsyncLLM``), ``server``
            (:class:`~specdecode.serve.settings.ServerSettings`) and ``fleet`` (:class:`FleetConfig`).

    Raises:
        ConfigError: every unknown or wrong key, each with the remedy.
    """
    checked = FleetArgs.of(args)
    fleet = checked.fleet
    deployment: Any = serve.deployment  # its types know the decorator only
    router: Any = "specdec_fleet.routing.AffinityRouter"
    replicas = deployment(Replica).options(
        name="Replica",
        **_how_many(fleet),
        **resources_of(fleet, checked.checked),
        **_lifetime(fleet),
        max_ongoing_requests=fleet.max_ongoing_requests,
        max_constructor_retry_count=START_ATTEMPTS,
        request_router_config=RequestRouterConfig(
            request_router_class=router,
            request_router_kwargs={"block": fleet.affinity_block, "slack": fleet.affinity_slack},
        ),
    )
    door = deployment(serve.ingress()(Door)).options(
        name="Door",
        num_replicas=fleet.num_doors,
        ray_actor_options={
            "num_cpus": 0,
            "resources": dict(_HEAD) if fleet.doors_on_head else {},
            **_environment(fleet),
        },
        max_ongoing_requests=1 << 20,  # requests wait in the engines, where priorities are known
        **_lifetime(fleet),
    )
    pulse = fleet.silence / PULSES
    engine = replicas.bind(checked.engine, checked.server.stuck_after, pulse)
    return door.bind(
        engine,
        checked.server,
        Tolerance(retries=fleet.retries, patience=fleet.patience, silence=fleet.silence),
        labelled=fleet.num_doors > 1,
        log_format=fleet.log_format,
        log_level=fleet.log_level,
    )


def _how_many(fleet: FleetConfig) -> dict[str, Any]:
    if fleet.autoscaling_config is not None:
        return {"autoscaling_config": dict(fleet.autoscaling_config)}
    return {"num_replicas": fleet.num_replicas}


def _lifetime(fleet: FleetConfig) -> dict[str, Any]:
    return {
        "graceful_shutdown_timeout_s": fleet.drain_timeout,
        "graceful_shutdown_wait_loop_s": 0.5,
        "health_check_period_s": fleet.health_check_period,
        "health_check_timeout_s": fleet.health_check_timeout,
        "logging_config": {"enable_access_log": False},  # core's server has a line for each request
    }


def _environment(fleet: FleetConfig) -> dict[str, Any]:
    return {} if fleet.runtime_env is None else {"runtime_env": dict(fleet.runtime_env)}


def resources_of(fleet: FleetConfig, engine: EngineArgs) -> dict[str, Any]:
    """What Ray books for a replica: a placement group.

    Its one bundle lies on one machine; under ``distributed_executor_backend="ray"`` there is a bundle for
    each rank, on as few machines as can be, and the replica is rank 0.
    """
    gpus = fleet.gpus_per_replica
    if gpus is None:
        gpus = float(engine.tensor_parallel_size) if _on_gpu(engine.device) else 0.0
    apart = engine.distributed_executor_backend == "ray"
    ranks = engine.tensor_parallel_size if apart else 1
    booked = {"CPU": fleet.cpus_per_replica, "GPU": gpus / ranks}
    first = {**booked, **fleet.resources_per_replica}
    bundles = [{name: amount for name, amount in bundle.items() if amount} for bundle in (first, booked)]
    return {
        "ray_actor_options": {
            "num_cpus": booked["CPU"],
            "num_gpus": booked["GPU"],
            "resources": dict(fleet.resources_per_replica),
            **_environment(fleet),
        },
        "placement_group_bundles": [bundles[0], *[bundles[1]] * (ranks - 1)],
        "placement_group_strategy": "PACK" if apart else "STRICT_PACK",
    }


def _on_gpu(device: str) -> bool:
    if device == "auto":
        return ray.is_initialized() and ray.cluster_resources().get("GPU", 0) > 0
    return device.startswith("cuda")
