"""What a fleet is started with, as keywords, or as ``args`` of a Ray Serve config file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import attrs
from specdecode.api.args import EngineArgs
from specdecode.config import structure
from specdecode.contract import ConfigError, option, within
from specdecode.serve.settings import ServerSettings, read_adapters, read_keys


def _positive(_: object, __: object, value: float | None) -> None:
    if value is not None and not value > 0:
        raise ValueError(f"must be above 0, got {value!r}")


def _not_negative(_: object, __: object, value: float | None) -> None:
    if value is not None and value < 0:
        raise ValueError(f"must be at least 0, got {value!r}")


@attrs.frozen(kw_only=True)
class FleetConfig:
    """How many replicas there are, what each one gets, and what happens when one is lost. Times are seconds.

    Raises:
        ConfigError: a value is out of its range.
    """

    num_replicas: int = option("engines", default=1, validator=within(1))
    autoscaling_config: dict[str, Any] | None = option(
        "Ray Serve's autoscaling_config as it is there (min_replicas, max_replicas, target_ongoing_requests, "
        "...), instead of num_replicas",
        default=None,
    )
    cpus_per_replica: float = option(
        "CPUs that Ray books for a replica", default=1.0, validator=_not_negative
    )
    gpus_per_replica: float | None = option(
        "GPUs that Ray books for a replica; none: tensor_parallel_size, or 0 without GPUs in the cluster",
        default=None,
        validator=_not_negative,
    )
    resources_per_replica: dict[str, float] = option(
        "Ray's own resources that a replica takes, to tell machines apart", default={}
    )
    runtime_env: dict[str, Any] | None = option(
        "Ray's runtime_env of replicas and doors, such as env_vars", default=None
    )
    max_ongoing_requests: int = option(
        "requests that a replica takes before others wait at the door", default=1024, validator=within(1)
    )
    retries: int = option(
        "attempts after the first one for a request whose replica is lost", default=3, validator=within(0)
    )
    patience: float = option(
        "that a request waits for a replica to take it", default=300.0, validator=_positive
    )
    silence: float = option(
        "after which a replica that gives no sign of life to a request counts as lost",
        default=30.0,
        validator=_positive,
    )
    drain_timeout: float = option(
        "that a replica or door which is to end has for what it accepted", default=600.0, validator=_positive
    )
    health_check_period: float = option("between two looks at a replica", default=5.0, validator=_positive)
    health_check_timeout: float = option(
        "for a replica to answer such a look; three failures in a row replace it",
        default=30.0,
        validator=_positive,
    )
    affinity_block: int = option(
        "tokens of a prefix by which requests are sent where it was computed; 0: prefixes play no role",
        default=64,
        validator=within(0),
    )
    affinity_slack: int = option(
        "requests that a replica may have more than the least busy one and still get those of its prefixes",
        default=4,
        validator=within(0),
    )
    num_doors: int = option("processes that answer HTTP", default=1, validator=within(1))
    doors_on_head: bool = option(
        "keep the doors on the head of the cluster, so that no other machine's loss cuts a connection",
        default=True,
    )
    log_format: Literal["text", "json"] = option("how the doors log", default="text")
    log_level: Literal["debug", "info", "warning", "error"] = option("what the doors log", default="info")


@attrs.frozen(kw_only=True)
class _Args:
    """``args`` of a Ray Serve config file."""

    model: str = option("directory, or hub id in the local cache, on every machine")
    engine: dict[str, Any] = option("further keywords of AsyncLLM", default={})
    server: dict[str, Any] = option(
        "ServerSettings by name; keys as api_keys, api_key_file, admin_key; adapters as lora_modules",
        default={},
    )
    fleet: FleetConfig = option("see docs/fleet.md", default=FleetConfig())


@attrs.frozen(kw_only=True)
class FleetArgs:
    """A fleet, checked."""

    engine: dict[str, Any]  #: keywords of ``AsyncLLM``
    checked: EngineArgs  #: the same, as an engine has them
    server: ServerSettings
    fleet: FleetConfig

    @classmethod
    def of(cls, mapping: Mapping[str, Any]) -> FleetArgs:
        """From ``model``, ``engine``, ``server`` and ``fleet``.

        Raises:
            ConfigError: every unknown or wrong key of one of them, each with the remedy.
        """
        args = structure(_Args, mapping, "args")
        if "model" in args.engine:
            raise ConfigError("args.engine.model stands beside args.model: leave it out")
        engine = {"model": args.model, **args.engine}
        fleet = args.fleet
        if fleet.autoscaling_config is not None and fleet.num_replicas != 1:
            raise ConfigError(
                f"args.fleet.num_replicas={fleet.num_replicas} and autoscaling_config both say how many "
                "replicas there are: keep one"
            )
        return cls(
            engine=engine, checked=EngineArgs.of(engine), server=server_settings(args.server), fleet=fleet
        )


def server_settings(mapping: Mapping[str, Any]) -> ServerSettings:
    """Settings by name; keys are texts, or lines of ``api_key_file``; adapters are ``lora_modules``.

    Raises:
        ConfigError: every unknown or wrong one.
    """
    given = dict(mapping)
    file = given.pop("api_key_file", None)
    keys = given.pop("api_keys", ())
    if isinstance(keys, str) or not all(isinstance(key, str) for key in keys):
        raise ConfigError("args.server.api_keys must be a list of texts")
    adapters = given.pop("lora_modules", ())
    if isinstance(adapters, str) or not all(isinstance(adapter, str) for adapter in adapters):
        raise ConfigError("args.server.lora_modules must be a list of texts, NAME=PATH each")
    given["adapters"] = read_adapters(list(adapters))
    given["api_keys"] = read_keys(list(keys), None if file is None else Path(file))
    if (admin := given.pop("admin_key", None)) is not None:
        given["admin_key"] = read_keys([admin], None)[0]
    if isinstance(names := given.get("served_model_name"), str | list):
        given["served_model_name"] = (names,) if isinstance(names, str) else tuple(names)
    return structure(ServerSettings, given, "args.server")
