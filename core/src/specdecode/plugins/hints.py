"""Which distribution carries a method that is not installed."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from importlib.resources import files


@functools.cache
def known_methods() -> Mapping[str, str]:
    """Method -> distribution, from ``hints.toml``."""
    text = files("specdecode").joinpath("hints.toml").read_text(encoding="utf-8")
    methods: dict[str, str] = tomllib.loads(text)["methods"]
    return methods
