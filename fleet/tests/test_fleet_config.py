"""What a fleet is started with: refused by name where it is wrong, and the same from command and file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="no Ray")

from specdec_fleet.app import resources_of
from specdec_fleet.causes import cause_of
from specdec_fleet.config import FleetArgs, FleetConfig
from specdecode.api.args import EngineArgs
from specdecode.contract import ConfigError
from typer.testing import CliRunner


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, r"args\.model is required"),
        ({"model": "m", "replicas": 2}, r"args\.replicas"),
        ({"model": "m", "fleet": {"num_replica": 2}}, r"args\.fleet\.num_replica\b.*num_replicas"),
        ({"model": "m", "fleet": {"retries": -1}}, r"args\.fleet\.retries"),
        ({"model": "m", "fleet": {"num_replicas": 2, "autoscaling_config": {}}}, "both say how many"),
        ({"model": "m", "engine": {"max_num_seq": 2}}, "max_num_seqs"),
        ({"model": "m", "engine": {"model": "n"}}, "leave it out"),
        ({"model": "m", "server": {"api_keys": "secret"}}, "must be a list"),
        ({"model": "m", "server": {"lora_modules": ["poet"]}}, "NAME=PATH"),
        ({"model": "m", "server": {"api_key_file": "/nowhere"}}, "cannot read"),
    ],
)
def test_what_is_wrong_is_named(args, message):
    with pytest.raises(ConfigError, match=message):
        FleetArgs.of(args)


def test_keys_are_read_and_not_shown(tmp_path):
    file = tmp_path / "keys"
    file.write_text("one  # of somebody\ntwo\n")
    server = FleetArgs.of(
        {
            "model": "m",
            "server": {
                "api_keys": ["three"],
                "api_key_file": str(file),
                "served_model_name": "x",
                "lora_modules": ["poet=/adapters/poet"],
            },
        }
    ).server
    assert [adapter.lora_path for adapter in server.adapters] == ["/adapters/poet"]
    assert [key.secret for key in server.api_keys] == ["three", "one", "two"]
    assert server.served_model_name == ("x",) and "three" not in repr(server)


def test_a_replica_is_one_bundle_with_its_devices():
    engine = EngineArgs(model="m", device="cuda")
    booked = resources_of(FleetConfig(cpus_per_replica=2, resources_per_replica={"rack": 1}), engine)
    assert booked["placement_group_bundles"] == [{"CPU": 2, "GPU": 1, "rack": 1}]
    assert booked["ray_actor_options"]["num_gpus"] == 1
    apart = EngineArgs(model="m", device="cuda", tensor_parallel_size=3, distributed_executor_backend="ray")
    booked = resources_of(FleetConfig(), apart)
    assert booked["placement_group_bundles"] == [{"CPU": 1, "GPU": 1}] * 3
    assert booked["ray_actor_options"]["num_gpus"] == 1 and booked["placement_group_strategy"] == "PACK"
    one_machine = EngineArgs(model="m", device="cuda", tensor_parallel_size=3)
    assert resources_of(FleetConfig(), one_machine)["placement_group_bundles"] == [{"CPU": 1, "GPU": 3}]
    assert resources_of(FleetConfig(), EngineArgs(model="m", device="cpu"))["placement_group_bundles"] == [
        {"CPU": 1}
    ]


def test_the_command_prints_the_file_of_what_it_would_start():
    from specdecode.cli.app import app

    line = (
        "fleet serve some/model --replicas 2 --max-replicas 8 --spec-method ngram --spec-tokens 5 "
        "--port 9000 --fleet-option retries=1 --server-option max_waiting=100 "
        "--engine-option max_num_seqs=8 --print-config"
    )
    done = CliRunner().invoke(app, line.split(), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    config = json.loads(done.output)
    assert config["http_options"]["port"] == 9000
    (application,) = config["applications"]
    assert application["import_path"] == "specdec_fleet:build"
    args = FleetArgs.of(application["args"])
    assert args.fleet.autoscaling_config == {"min_replicas": 2, "max_replicas": 8}
    assert args.fleet.retries == 1 and args.server.max_waiting == 100
    assert args.checked.max_num_seqs == 8
    assert args.engine["speculative_config"] == {"method": "ngram", "num_speculative_tokens": 5}


def test_an_unknown_sampling_field_is_named():
    from specdecode.cli.app import app

    line = "fleet batch m --data d --out o --sampling temprature=1"
    done = CliRunner().invoke(app, line.split())
    assert done.exit_code == 1 and "temprature" in (done.output + (done.stderr or ""))


def test_the_example_of_a_config_file_is_one(tmp_path):
    yaml = pytest.importorskip("yaml")
    from ray.serve.schema import ServeDeploySchema

    example = Path(__file__).resolve().parents[2] / "examples/serving/fleet.yaml"
    config = yaml.safe_load(example.read_text())
    (application,) = ServeDeploySchema(**config).applications
    keys = tmp_path / "api-keys"
    keys.write_text("secret\n")
    args = dict(application.args)
    args["server"] = args["server"] | {"api_key_file": str(keys)}
    fleet = FleetArgs.of(args)
    assert fleet.server.served_model_name == ("llama",) and len(fleet.server.api_keys) == 1
    assert [one.name for one in application.deployments] == ["Replica"]


def test_the_manual_lists_every_setting():
    import attrs

    manual = (Path(__file__).resolve().parents[2] / "docs/fleet.md").read_text()
    fields = {field.name for field in attrs.fields(FleetConfig)}
    assert not {name for name in fields if f"`{name}`" not in manual}


FRAMES = """ray::Replica() (pid=1, ip=10.0.0.1)
  File "replica.py", line 7, in start
    raise RuntimeError(told)
RuntimeError: Traceback (most recent call last):
  File "files.py", line 3, in read
    model: str = ...
"""


@pytest.mark.parametrize(
    ("told", "cause"),
    [
        (
            FRAMES + "specdecode.contract.errors.ConfigError: - a is wrong\n- b is wrong",
            "- a is wrong\n- b is wrong",
        ),
        (
            FRAMES + "json.decoder.JSONDecodeError: no value\nRay: read on",
            "json.decoder.JSONDecodeError: no value",
        ),
        ("it takes long", "it takes long"),
    ],
)
def test_of_what_ray_tells_the_cause_is_told(told, cause):
    assert cause_of(told) == cause
