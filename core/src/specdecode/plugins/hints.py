"""What core knows about methods by name: who carries them, and what else they are called."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

import attrs


@attrs.frozen(kw_only=True)
class Spelling:
    """A method by another name; ``note``: what a user of that name should know, if anything."""

    method: str
    note: str = ""


def known_methods() -> Mapping[str, str]:
    """Method -> distribution that carries it."""
    methods: dict[str, str] = _hints()["methods"]
    return methods


@functools.cache
def other_spellings() -> Mapping[str, Spelling]:
    """Another name of a method -> the method."""
    return {name: Spelling(**entry) for name, entry in _hints()["spellings"].items()}


def not_methods() -> Mapping[str, str]:
    """A method of vLLM that is none here -> what to do instead."""
    reasons: dict[str, str] = _hints()["not_methods"]
    return reasons


@functools.cache
def _hints() -> dict[str, Any]:
    return tomllib.loads(files("specdecode").joinpath("hints.toml").read_text(encoding="utf-8"))
