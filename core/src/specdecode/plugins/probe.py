"""``python -m specdecode.plugins.probe PACKAGE [MODULE ...]``: import them all, tell how it went.

One JSON value a line: ``{"module": M}`` before each import, ``{"module": M, "ok": ..., "detail": ...}`` after
it, and ``"done"`` at the end, so that a process that dies tells where.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from specdecode.contract.errors import FAULTS

#: Parts of a package that are run, not imported.
_SKIPPED = frozenset({"__main__", "conftest", "tests"})


def main(package: str, modules: list[str]) -> None:
    # What plugins print while they are imported must not mix with the results.
    results = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for module in modules:
        _import(module, results)
    if _import(package, results):
        for module in _submodules(sys.modules[package]):
            _import(module, results)
    _tell(results, "done")


def _submodules(package: Any) -> Iterator[str]:
    for info in pkgutil.iter_modules(getattr(package, "__path__", ()), f"{package.__name__}."):
        if info.name.rpartition(".")[2] in _SKIPPED:
            continue
        yield info.name
        if info.ispkg and info.name in sys.modules:
            yield from _submodules(sys.modules[info.name])


def _import(module: str, results: TextIO) -> bool:
    _tell(results, {"module": module})
    try:
        importlib.import_module(module)
    except FAULTS as error:
        _tell(results, {"module": module, "ok": False, "detail": f"{type(error).__name__}: {error}"})
        return False
    _tell(results, {"module": module, "ok": True})
    return True


def _tell(results: TextIO, message: Any) -> None:
    print(json.dumps(message), file=results, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
