"""How the distribution that carries the method presents itself."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ....plugins.discovery import CORE, discover
from ....plugins.manager import IN_PROCESS
from ..checks import Broken, Group, NotApplicable

if TYPE_CHECKING:
    from ....plugins.discovery import Candidate
    from ..subject import Subject

GROUP = Group("packaging", order=10)

#: Modules that cost seconds, or a device, and may come with a method's work only.
_HEAVY = ("torch", "transformers", "numpy", "scipy", "numba", "triton", "jax", "tensorflow", "vllm")
_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")
_TIMEOUT_S = 120.0

# Loads one entry point as the plugin manager does, collects its methods, and tells what came along.
_PROBE = """
import importlib, json, sys
module, _, attribute = sys.argv[1].partition(":")
plugin = importlib.import_module(module)
for name in filter(None, attribute.split(".")):
    plugin = getattr(plugin, name)
list(plugin.specdecode_proposers())
print(json.dumps([name for name in sys.argv[2:] if name in sys.modules]))
"""


def _candidate(subject: Subject) -> Candidate:
    """The entry point of the method's plugin."""
    provided = subject.prepared.provided
    if provided.dist == IN_PROCESS:
        raise NotApplicable("registered in this process, by no distribution")
    return next(c for c in discover() if (c.name, c.dist) == (provided.family, provided.dist))


@GROUP.check("light-import", "a module that imports nothing heavy")
def light_import(subject: Subject) -> str | None:
    """In a process of its own: this one has everything imported already."""
    candidate = _candidate(subject)
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-P", "-c", _PROBE, candidate.target, *_HEAVY],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
    )
    if done.returncode:
        raise Broken(f"{candidate.target} cannot be imported alone: {done.stderr.strip().splitlines()[-1:]}")
    heavy = json.loads(done.stdout.splitlines()[-1])
    if heavy:
        raise Broken(f"{candidate.target} imports {', '.join(heavy)}: import it in build")
    return None


@GROUP.check("bounded-core-range", 'dependencies = ["specdec-core>=0.1,<1"]')
def bounded_core_range(subject: Subject) -> str | None:
    requirements = [Requirement(text) for text in _candidate(subject).requires]
    mine = [r for r in requirements if canonicalize_name(r.name) == CORE and r.marker is None]
    if not mine:
        raise Broken(f"the distribution does not require {CORE}")
    operators = {specifier.operator for r in mine for specifier in r.specifier}
    missing = [
        what
        for what, bounds in (("a lower", {">", ">=", "~=", "=="}), ("an upper", {"<", "<=", "~=", "=="}))
        if not operators & bounds
    ]
    if missing:
        raise Broken(f"{', '.join(map(str, mine))} has not {' and '.join(missing)} bound")
    return None


@GROUP.check("entry-name", "its name is the family")
def entry_name(subject: Subject) -> str | None:
    candidate = _candidate(subject)
    names = [candidate.name, *subject.record.methods]
    bad = [name for name in names if not _NAME.fullmatch(name)]
    if bad:
        raise Broken(f"names are lower-case words joined by - or _, got {', '.join(map(repr, bad))}")
    return None
