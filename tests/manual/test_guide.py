"""The plugin-author guide, followed to the letter: the files it has are a method that conforms."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

GUIDE = Path(__file__).resolve().parents[2] / "docs/plugins.md"
#: A file's name opens a paragraph, and the block behind it is its content.
FILES = re.compile(r"^`(\S+\.(?:py|toml))`[^\n]*\n(?:.*\n)*?```\w+\n((?:.*\n)*?)```$", re.MULTILINE)
OTHERS = re.compile(r"^```python\n((?:.*\n)*?)```$", re.MULTILINE)


@pytest.fixture(scope="module")
def followed(tmp_path_factory):
    """Runs a command where the guide's method is installed."""
    folder, site = tmp_path_factory.mktemp("specdec-foo"), tmp_path_factory.mktemp("site")
    files = dict(FILES.findall(GUIDE.read_text()))
    assert list(files) == ["pyproject.toml", "config.py", "plugin.py", "proposer.py"]
    (folder / "specdec_foo").mkdir()
    (folder / "specdec_foo" / "__init__.py").touch()
    for name, content in files.items():
        (folder / name if name.endswith(".toml") else folder / "specdec_foo" / name).write_text(content)

    def run(*arguments: str) -> str:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]),
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "200",
        }
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=500,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run(
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
        "--target",
        str(site),
        ".",
    )
    return run


COMMAND = "from specdecode.cli import main; main()"


def test_its_method_is_found_and_described(followed):
    assert "specdec-foo" in followed("-c", COMMAND, "plugins", "list")
    told = followed("-c", COMMAND, "plugins", "show", "foo")
    assert "what it does, in a line" in told and "tokens looked at" in told


def test_its_method_conforms(followed):
    report = followed("-c", COMMAND, "plugins", "conform", "foo", "--config", '{"num_speculative_tokens": 4}')
    assert '"ok": true' in report.splitlines()[-1]


def test_what_else_it_says_in_python_runs(followed, tmp_path):
    text = GUIDE.read_text()
    files = dict(FILES.findall(text)).values()
    rest = [block for block in OTHERS.findall(text) if block not in files]
    assert len(rest) >= 2
    for index, block in enumerate(rest):
        (tmp_path / f"block{index}.py").write_text(block.replace("my_plugin_module", "object()"))
        followed(str(tmp_path / f"block{index}.py"))
