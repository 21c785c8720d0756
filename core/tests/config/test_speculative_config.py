"""speculative_config in all its forms, and the keys that core owns."""

from __future__ import annotations

import copy
import json
import pickle

import attrs
import pytest
from specdecode.config import Policy, SpeculativeConfig, structure
from specdecode.contract import ConfigError, Probs

GIVEN = {"method": "m", "num_speculative_tokens": 4, "disable_by_batch_size": 8}


@pytest.mark.parametrize(
    "made",
    [
        SpeculativeConfig(GIVEN),
        SpeculativeConfig(**GIVEN),
        SpeculativeConfig(json.dumps(GIVEN)),
        SpeculativeConfig(SpeculativeConfig(GIVEN)),
        SpeculativeConfig(
            {"method": "other", "num_speculative_tokens": 4}, method="m", disable_by_batch_size=8
        ),
        SpeculativeConfig.of(GIVEN),
        pickle.loads(pickle.dumps(SpeculativeConfig(GIVEN))),
        copy.deepcopy(SpeculativeConfig(GIVEN)),
    ],
)
def test_every_form_is_the_same_mapping(made):
    assert made == GIVEN
    assert dict(made) == GIVEN
    assert len(made) == 3
    assert (made.method, made.disable_by_batch_size, made.num_speculative_tokens) == ("m", 8, 4)
    assert made.policy_keys == {"method": "m", "disable_by_batch_size": 8}
    assert made.method_keys == {"num_speculative_tokens": 4}
    assert eval(repr(made), {"SpeculativeConfig": SpeculativeConfig}) == made


def test_core_keys_always_exist_and_others_only_if_given():
    config = SpeculativeConfig()
    defaults = {field.name: field.default for field in attrs.fields(Policy)}
    assert {name: getattr(config, name) for name in defaults} == defaults
    assert config.rejection_sample_method == "invariant"
    with pytest.raises(AttributeError, match="speculative_config has no key 'num_speculative_tokens'"):
        _ = config.num_speculative_tokens
    assert "method" not in config


def test_it_is_read_only_and_keeps_no_tie_to_what_it_was_made_of():
    given = dict(GIVEN)
    config = SpeculativeConfig(given)
    given["method"] = "changed"
    assert config.method == "m"
    with pytest.raises(AttributeError):
        config.method = "changed"
    with pytest.raises(TypeError):
        config["method"] = "changed"
    assert SpeculativeConfig.of(config) is config


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{", "speculative_config is not valid JSON"),
        ("[1]", "speculative_config must be a JSON object, got '[1]'"),
        ('{"a": 1, "b": 2, "a": 3}', "speculative_config gives a twice; keep one"),
        (3, "speculative_config must be a mapping, a JSON string or a SpeculativeConfig, got 3"),
        ([("method", "m")], "speculative_config must be a mapping"),
    ],
)
def test_what_is_no_mapping(given, message):
    with pytest.raises(ConfigError) as raised:
        SpeculativeConfig(given)
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("method", 3, "must be a string or None, got 3"),
        ("disable_by_batch_size", 1, "must be at least 2, got 1"),
        ("disable_by_batch_size", "8", "must be an integer or None, got '8'"),
        ("adaptive", 1, "must be true or false, got 1"),
        ("num_speculative_tokens_per_batch_size", [], "must be entries [low, high, tokens] with low <="),
        ("num_speculative_tokens_per_batch_size", [[2, 4, 3]], "must be entries [low, high, tokens] with"),
        ("num_speculative_tokens_per_batch_size", [[1, 4, 3], [4, 8, 1]], "must be entries [low, high, to"),
        ("num_speculative_tokens_per_batch_size", [[1, 4, -1]], "must be entries [low, high, tokens] with"),
        ("posterior_threshold", 0.0, "must be above 0 and at most 1, got 0.0"),
        ("posterior_alpha", 1.5, "must be above 0 and at most 1, got 1.5"),
        ("rejection_sample_method", "strict", "must be one of 'invariant', 'standard', 'block',"),
        ("synthetic_acceptance_rates", [0.5, 0.6], "must be numbers from 0 to 1, none larger than the one"),
        ("synthetic_acceptance_rates", [1.5], "must be numbers from 0 to 1, none larger than the one before"),
        ("synthetic_acceptance_rates", [], "must be numbers from 0 to 1, none larger than the one before"),
        ("synthetic_acceptance_length", 0.5, "must be at least 1, got 0.5"),
    ],
)
def test_policy_keys_are_checked(key, value, message):
    with pytest.raises(ConfigError) as raised:
        structure(Policy, {key: value}, "speculative_config")
    (fault,) = raised.value.faults
    assert fault.startswith(f"speculative_config.{key} {message}")


@pytest.mark.parametrize(
    ("rule", "probs"),
    [
        ("invariant", Probs.NONE),
        ("standard", Probs.FULL),
        ("block", Probs.FULL),
        ("typical", Probs.NONE),
    ],
)
def test_rules_that_are_built(rule, probs):
    policy = structure(Policy, {"rejection_sample_method": rule}, "speculative_config")
    assert policy.rejection_sample_method == rule and policy.probs is probs


RATES, LENGTH = {"synthetic_acceptance_rates": [0.9, 0.3]}, {"synthetic_acceptance_length": 2.5}
SYNTHETIC = {"rejection_sample_method": "synthetic"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            SYNTHETIC,
            "'synthetic' wants one of synthetic_acceptance_rates and synthetic_acceptance_length, got nei",
        ),
        (SYNTHETIC | RATES | LENGTH, "synthetic_acceptance_rates and synthetic_acceptance_length, got both"),
        (RATES, "synthetic_acceptance_rates have no effect under rejection_sample_method='invariant'"),
        (LENGTH | {"rejection_sample_method": "block"}, "no effect under rejection_sample_method='block'"),
    ],
)
def test_synthetic_acceptance_is_said_once_and_to_its_rule(given, message):
    with pytest.raises(ConfigError) as raised:
        structure(Policy, given, "speculative_config")
    (fault,) = raised.value.faults
    assert message in fault
    structure(Policy, SYNTHETIC | RATES, "speculative_config")
    structure(Policy, SYNTHETIC | LENGTH, "speculative_config")


def test_thresholds_are_said_to_the_typical_rule():
    given = {"posterior_threshold": 0.2, "posterior_alpha": 0.4}
    structure(Policy, given | {"rejection_sample_method": "typical"}, "speculative_config")
    with pytest.raises(ConfigError, match="posterior_threshold and posterior_alpha have no effect under"):
        structure(Policy, given, "speculative_config")


def test_one_way_of_choosing_lengths():
    given = {"adaptive": True, "num_speculative_tokens_per_batch_size": [[1, 8, 4]]}
    with pytest.raises(ConfigError, match="both choose the draft length: leave one out"):
        structure(Policy, given, "speculative_config")
    for key, value in given.items():
        structure(Policy, {key: value}, "speculative_config")


def test_values_of_today_pass():
    given = {
        "method": "m",
        "disable_by_batch_size": 2,
        "num_speculative_tokens_per_batch_size": ((1, 16, 3), (64, 128, 0)),
        "adaptive": False,
        "rejection_sample_method": "invariant",
        "posterior_threshold": None,
        "posterior_alpha": None,
        "synthetic_acceptance_rates": None,
        "synthetic_acceptance_length": None,
    }
    assert attrs.asdict(structure(Policy, given, "speculative_config")) == given
