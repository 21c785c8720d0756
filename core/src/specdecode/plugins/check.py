"""Do the installed plugins really import? Their heavy imports, each plugin in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence

import attrs

from .loading import missing_imports
from .manager import PluginManager
from .records import PluginRecord, Provided, Status

#: Seconds that the imports of one plugin may take.
TIMEOUT_S = 600.0


@attrs.frozen(kw_only=True)
class ImportResult:
    """One module that was imported, or was to be."""

    module: str
    ok: bool
    detail: str = ""


@attrs.frozen(kw_only=True)
class CheckResult:
    """One plugin after its check; ``status`` is broken if a module does not import."""

    record: PluginRecord
    status: Status
    detail: str
    imports: tuple[ImportResult, ...] = ()

    @property
    def faulty(self) -> bool:
        """Whether something is wrong; a plugin that the user blocked is not."""
        return self.status not in (Status.OK, Status.BLOCKED)


def check_plugins(
    manager: PluginManager,
    *,
    started: Callable[[PluginRecord], None] = lambda record: None,
    timeout_s: float = TIMEOUT_S,
) -> list[CheckResult]:
    """Check every plugin: its record, its methods' modules, and the import of all of its package.

    Args:
        started: called before each plugin, for progress.
        timeout_s: seconds that the imports of one plugin may take.
    """
    results = []
    for record in manager.records:
        started(record)
        if record.status is not Status.OK:
            results.append(CheckResult(record=record, status=record.status, detail=record.detail))
            continue
        results.append(_check(record, manager.provided_by(record), timeout_s))
    return results


def _check(record: PluginRecord, methods: Sequence[Provided], timeout_s: float) -> CheckResult:
    missing = sorted({module for provided in methods for module in missing_imports(provided.spec)})
    if missing:
        detail = f"not found (declared in imports): {', '.join(missing)}"
        return CheckResult(record=record, status=Status.UNAVAILABLE, detail=detail)
    declared = sorted({module for provided in methods for module in provided.spec.imports})
    target = record.target.partition(":")[0].strip()
    imports = _probe(target.rpartition(".")[0] or target, declared, timeout_s)
    failed = [result for result in imports if not result.ok]
    if failed:
        detail = "; ".join(f"{result.module}: {result.detail}" for result in failed)
        return CheckResult(record=record, status=Status.BROKEN, detail=detail, imports=imports)
    return CheckResult(
        record=record,
        status=Status.OK,
        detail="; ".join(filter(None, (f"{len(imports)} modules import", record.detail))),
        imports=imports,
    )


def _probe(package: str, modules: Sequence[str], timeout_s: float) -> tuple[ImportResult, ...]:
    """Import ``modules`` and all of ``package`` in a new process that sees this one's ``sys.path``."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    command = [sys.executable, "-P", "-m", "specdecode.plugins.probe", package, *modules]
    try:
        process = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=timeout_s
        )
    except subprocess.TimeoutExpired as expired:
        output = expired.stdout or b""
        text = output.decode() if isinstance(output, bytes) else output
        return _results(text, f"takes longer than {timeout_s:g} s")
    return _results(process.stdout, _death(process))


def _results(output: str, unfinished: str) -> tuple[ImportResult, ...]:
    """The results of a probe; the module that it was at when it ended early gets ``unfinished``."""
    results: dict[str, ImportResult] = {}
    complete = False
    for line in output.splitlines():
        message = json.loads(line)
        if message == "done":
            complete = True
        elif "ok" in message:
            results[message["module"]] = ImportResult(**message)
        else:
            results[message["module"]] = ImportResult(module=message["module"], ok=False, detail=unfinished)
    if not complete and all(result.ok for result in results.values()):
        results["(probe)"] = ImportResult(module="(probe)", ok=False, detail=unfinished)
    return tuple(results.values())


def _death(process: subprocess.CompletedProcess[str]) -> str:
    if process.returncode < 0:
        return f"the process died of {signal.Signals(-process.returncode).name}"
    last = process.stderr.strip().splitlines()[-1:] or ["no message"]
    return f"the process ended with status {process.returncode}: {last[0]}"
