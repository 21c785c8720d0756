"""How the distribution that carries the method presents itself."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

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


# Uses the plugin as a worker does: a new process, loaded twice, the keys structured and planned anew.
_WORKER = """
import pickle, sys
from specdecode.plugins import PluginManager, prepare
mapping, target = pickle.load(sys.stdin.buffer)
told = [prepare(PluginManager(), mapping, target).needs for _ in range(2)]
sys.stdout.buffer.write(pickle.dumps(told))
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
    done = _in_a_process(_PROBE, candidate.target, *_HEAVY)
    if done.returncode:
        raise Broken(f"{candidate.target} cannot be imported alone: {_last_line(done.stderr)}")
    heavy = json.loads(done.stdout.splitlines()[-1])
    if heavy:
        raise Broken(f"{candidate.target} imports {', '.join(heavy)}: import it in build")
    return None


def _texts(value: Any) -> Iterator[str]:
    """Every string in what JSON can hold."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _texts(inner)


def _in_a_process(code: str, *arguments: str, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run ``code`` where nothing was imported yet, with this process's path."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return subprocess.run(
        [sys.executable, "-P", "-c", code, *arguments],
        input=given,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        timeout=_TIMEOUT_S,
    )


def _last_line(stderr: bytes) -> str:
    return "".join(stderr.decode(errors="replace").strip().splitlines()[-1:])


@GROUP.check("resolved-again", "loading is idempotent, and nothing that was built crosses a process")
def resolved_again(subject: Subject) -> str | None:
    """What a worker is sent can be pickled; there it becomes the same needs, twice."""
    _candidate(subject)
    records = [record for record in subject.manager.records if record.dist == IN_PROCESS]
    local = {method for record in records for method in record.methods}
    if children := sorted(local & set(_texts(subject.mapping))):
        raise NotApplicable(f"{', '.join(children)} was registered in this process, by no distribution")
    try:
        given = pickle.dumps((subject.mapping, subject.toy.info))
    except Exception as error:
        raise Broken(f"its keys cannot be sent to a process: {type(error).__name__}: {error}") from error
    done = _in_a_process(_WORKER, given=given)
    if done.returncode:
        raise Broken(f"in another process it is not found again: {_last_line(done.stderr)}")
    for number, needs in enumerate(pickle.loads(done.stdout), start=1):
        if needs != subject.needs:
            raise Broken(f"in another process, loaded {number} times, it needs {needs}; here {subject.needs}")
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
