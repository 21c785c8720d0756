"""The example plugins, as their authors would try them: installed beside core, their own tests run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted(
    path.parent for path in Path(__file__).parents[1].glob("examples/proposer-*/pyproject.toml")
)


def test_there_are_some():
    assert EXAMPLES


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_installs_and_passes_its_tests(example, tmp_path):
    folder, site = tmp_path / example.name, tmp_path / "site"
    shutil.copytree(example, folder, ignore=shutil.ignore_patterns("__pycache__", ".*_cache", "*.egg-info"))

    def run(*arguments: str) -> str:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]),
            "OMP_NUM_THREADS": "1",
        }
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=800,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    offline = ("--no-deps", "--no-build-isolation", "--no-index")
    run("-m", "pip", "install", "--quiet", *offline, "--target", str(site), ".")
    told = run("-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert " passed" in told and "failed" not in told
