"""Finding plugins in package metadata, without importing them.

pluggy's own loader lets one broken plugin end the host, and silently skips the second of two
distributions whose entry points have the same name; hence this one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import importlib_metadata
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from .markers import GROUP

#: The distribution whose version a plugin's requirements are held against.
CORE = "specdec-core"


@attrs.frozen(kw_only=True)
class Candidate:
    """An entry point, before anything of it was imported."""

    name: str
    dist: str
    version: str
    target: str
    entry_point: importlib_metadata.EntryPoint | None = None
    requires: tuple[str, ...] = ()
    fault: str = ""  #: why its metadata cannot be read

    @property
    def key(self) -> str:
        """Tells it from all others, also from one of the same name in another distribution."""
        return f"{self.dist}:{self.name}"

    @property
    def label(self) -> str:
        """As messages name it."""
        return f"{self.name} ({f'{self.dist} {self.version}'.rstrip()})"


def discover() -> Iterator[Candidate]:
    """Every entry point of the group, of all distributions on ``sys.path`` that are not shadowed."""
    seen: set[str] = set()
    for dist in importlib_metadata.distributions():
        try:
            entry_points = tuple(dist.entry_points.select(group=GROUP))
        except Exception as error:  # one unreadable distribution must not hide the others
            if _mentions_group(dist):
                yield _unreadable(dist, f"entry_points.txt cannot be read: {error}")
            continue
        if not entry_points:
            continue
        try:
            name = canonicalize_name(dist.name)
            version = dist.version
            requires = tuple(dist.requires or ())
        except Exception as error:
            yield _unreadable(dist, f"METADATA cannot be read: {type(error).__name__}: {error}")
            continue
        if name in seen or _shadowed(dist, name):
            continue
        seen.add(name)
        for entry_point in entry_points:
            yield Candidate(
                name=entry_point.name,
                dist=name,
                version=version,
                target=entry_point.value,
                entry_point=entry_point,
                requires=requires,
            )


def _mentions_group(dist: Any) -> bool:
    try:
        return f"[{GROUP}]" in (dist.read_text("entry_points.txt") or "")
    except (OSError, UnicodeError):
        return False


def _shadowed(dist: Any, name: str) -> bool:
    """Whether another distribution of that name comes earlier on ``sys.path``."""
    try:
        first = importlib_metadata.distribution(name)
    except importlib_metadata.PackageNotFoundError:  # its folder is named otherwise than it names itself
        return False
    return bool(first.locate_file("") != dist.locate_file(""))


def _unreadable(dist: Any, fault: str) -> Candidate:
    folder = Path(getattr(dist, "_path", "unknown")).name  # the name that is left when METADATA is not
    name, _, version = folder.removesuffix(".dist-info").partition("-")
    return Candidate(name=name, dist=canonicalize_name(name), version=version, target="", fault=fault)


def core_version() -> str | None:
    """Version of the installed core; None if it runs from a source tree that is not installed."""
    try:
        return importlib_metadata.version(CORE)
    except importlib_metadata.PackageNotFoundError:
        return None


def refusal(requires: tuple[str, ...], version: str | None) -> str:
    """Why requirements rule this core out; empty if they do not."""
    for text in requires:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue  # pip would not have installed by it; what core can tell is whether the rest fits
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if version is None or canonicalize_name(requirement.name) != CORE or not applies:
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            return f"requires {CORE} {requirement.specifier}; installed is {version}"
    return ""


def missing_requirements(dist: str) -> list[str]:
    """What ``dist`` requires and is not installed, as ``pip install`` takes it."""
    try:
        texts = importlib_metadata.requires(dist) or ()
    except importlib_metadata.PackageNotFoundError:
        return []
    missing = []
    for text in texts:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            importlib_metadata.distribution(requirement.name)
        except importlib_metadata.PackageNotFoundError:
            missing.append(f"{requirement.name}{requirement.specifier}")
    return missing
