"""The bounds of prompt lookup: defaults where one or both are left out, and what is refused."""

import attrs
import pytest
from specdec_ngram.config import DEFAULT_MAX, DEFAULT_MIN, NgramConfig
from specdecode.config.structure import structure
from specdecode.contract import ConfigError


@pytest.mark.parametrize(
    ("given", "windows"),
    [
        ({}, (2, 5)),
        ({"prompt_lookup_max": 4}, (2, 4)),
        ({"prompt_lookup_max": 1}, (1, 1)),
        ({"prompt_lookup_min": 3}, (3, 5)),
        ({"prompt_lookup_min": 7}, (7, 7)),
        ({"prompt_lookup_min": 1, "prompt_lookup_max": 3}, (1, 3)),
        ({"prompt_lookup_min": 4, "prompt_lookup_max": 4}, (4, 4)),
    ],
)
def test_windows_in_force(given, windows):
    assert NgramConfig(num_speculative_tokens=5, **given).windows == windows


def test_the_documented_defaults_are_the_real_ones():
    docs = {field.name: field.metadata["doc"] for field in attrs.fields(NgramConfig)}
    assert str(DEFAULT_MAX) in docs["prompt_lookup_max"]
    assert str(DEFAULT_MIN) in docs["prompt_lookup_min"]
    assert all(docs.values())


@pytest.mark.parametrize("field", ["prompt_lookup_max", "prompt_lookup_min", "num_speculative_tokens"])
@pytest.mark.parametrize("value", [0, -1, 10**6])
def test_bounds_outside_their_range_are_refused(field, value):
    with pytest.raises(ValueError, match=f"got {value}"):
        NgramConfig(**{"num_speculative_tokens": 5, field: value})


def test_min_above_max_is_refused_and_names_both():
    with pytest.raises(ValueError, match=r"must be at most prompt_lookup_max \(2\), got 3"):
        NgramConfig(num_speculative_tokens=5, prompt_lookup_min=3, prompt_lookup_max=2)


def test_core_tells_all_faults_under_their_path():
    mapping = {
        "num_speculative_tokens": 5,
        "prompt_lookup_min": 4,
        "prompt_lookup_max": 3,
        "prompt_lookup_maxx": 3,
    }
    with pytest.raises(ConfigError) as caught:
        structure(NgramConfig, mapping, "speculative_config")
    message = str(caught.value)
    assert "speculative_config.prompt_lookup_min must be at most prompt_lookup_max (3), got 4" in message
    assert "speculative_config.prompt_lookup_maxx" in message and "'prompt_lookup_max'" in message
