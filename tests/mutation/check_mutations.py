"""Puts deliberate one-line faults into the engine and shows that a named test catches each.

    python tests/mutation/check_mutations.py [--jobs 2] [--only NAME ...]

Every fault of ``mutations.toml`` is made in a copy of the sources, never in the working tree; its test
must fail there, and pass on a copy without a fault. Prints a table; exit code 1 if a fault survives.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[2]
SOURCES = ("core/src", "kernels/src", "plugins/ngram/src")
LIST = Path(__file__).with_name("mutations.toml")
SECONDS = 600


@attrs.frozen(kw_only=True)
class Mutation:
    """One fault: ``old`` stands once in ``file`` and becomes ``new``; ``test`` must notice."""

    name: str
    file: str
    old: str
    new: str
    test: str

    def apply(self, root: Path) -> None:
        """Raises ValueError if ``old`` does not stand in the file exactly once."""
        path = root / self.file
        text = path.read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.old!r} stands {text.count(self.old)} times in {self.file}")
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")


def mutations() -> list[Mutation]:
    """All of the list."""
    return [Mutation(**entry) for entry in tomllib.loads(LIST.read_text(encoding="utf-8"))["mutation"]]


def outcome(test: str, mutation: Mutation | None) -> int:
    """Exit code of pytest on ``test`` with the fault in place (None: without any)."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        for folder in SOURCES:
            shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
        if mutation is not None:
            mutation.apply(root)
        paths = [*(str(root / folder) for folder in SOURCES), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *test.split()]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=SECONDS)
        return done.returncode


def verdict(mutation: Mutation) -> str:
    """``caught``, ``SURVIVED``, or why neither can be said."""
    try:
        found = outcome(mutation.test, mutation)
    except subprocess.TimeoutExpired:
        return "caught (it hangs)"
    if found == 0:
        return "SURVIVED"
    if found != 1:
        return f"pytest ended with {found}: is the test's name right?"
    return "caught" if outcome(mutation.test, None) == 0 else "the test fails without the fault too"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", nargs="*", help="names of faults")
    arguments = parser.parse_args()
    chosen = [m for m in mutations() if not arguments.only or m.name in arguments.only]
    table = Table("fault", "file", "test", "outcome")
    failed = 0
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for mutation, said in zip(chosen, pool.map(verdict, chosen), strict=True):
            failed += not said.startswith("caught")
            table.add_row(mutation.name, Path(mutation.file).name, mutation.test, said)
    Console(width=180).print(table)
    print(f"{len(chosen) - failed} of {len(chosen)} faults are caught")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
