"""What a plugin, a configuration or ``--help`` imports is light."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "numpy")

CASES = {
    "contract": ("import specdecode.contract", (*HEAVY, "pluggy", "cattrs")),
    "hookimpl": ("from specdecode.plugins import hookimpl", (*HEAVY, "cattrs", "importlib_metadata")),
    "config": ("import specdecode.config", (*HEAVY, "cattrs")),
    "manager": ("from specdecode.plugins import default_manager; default_manager().methods()", ("torch",)),
    "prepare": ("from specdecode.plugins import prepare, read_checkpoint", ("torch", "transformers")),
    "command": (
        "from specdecode.cli import main; import sys; sys.argv = ['specdecode', '--help']\n"
        "try: main()\nexcept SystemExit as end: assert not end.code",
        ("torch", "transformers"),
    ),
}


def test_the_package_alone_imports_nothing_but_itself():
    """Its names load on first use, and no plugin before one is asked for."""
    probe = "import sys; known = set(sys.modules); import specdecode; print(*(set(sys.modules) - known))"
    output = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True).stdout
    foreign = {name.partition(".")[0] for name in output.split()} - sys.stdlib_module_names
    assert foreign == {"specdecode"}
    assert [name for name in output.split() if name.startswith("specdec")] == ["specdecode"]


@pytest.mark.parametrize("case", CASES)
def test_imports(case):
    code, heavy = CASES[case]
    probe = f"{code}\nimport sys, json; print(json.dumps([m for m in {heavy!r} if m in sys.modules]))"
    output = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True).stdout
    assert json.loads(output.splitlines()[-1]) == []
