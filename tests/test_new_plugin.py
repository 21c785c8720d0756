"""``specdecode new-plugin``: what it writes installs, is well-formed, and passes its own tests, untouched."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from specdecode.cli.app import app
from typer.testing import CliRunner

pytest.importorskip("copier")


def made(tmp_path, *arguments):
    return CliRunner().invoke(app, ["new-plugin", *arguments, "--into", str(tmp_path)])


def test_a_new_plugin_installs_and_passes_its_tests_untouched(tmp_path):
    assert (
        made(
            tmp_path, "fortune-teller", "--author", 'Ada "the first"', "--summary", 'drafts "by heart"'
        ).exit_code
        == 0
    )
    folder, site = tmp_path / "specdec-fortune-teller", tmp_path / "site"

    def run(*command):
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]),
            "OMP_NUM_THREADS": "1",
        }
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=500
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert (folder / "LICENSE").read_text() == (Path(__file__).parents[1] / "LICENSE").read_text()
    python = sys.executable
    run(
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--target",
        str(site),
        ".",
    )
    run(python, "-m", "ruff", "check", ".")
    run(python, "-m", "ruff", "format", "--check", ".")
    run(python, "-m", "mypy")
    listed = run(python, "-c", "from specdecode.cli import main; main()", "plugins", "show", "fortune_teller")
    assert "fortune_teller: drafts 'by heart'" in listed and "fortune_teller_window" in listed
    told = run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert " passed" in told and "failed" not in told and "xfailed" not in told


@pytest.mark.parametrize("name", ["Foo", "9lives", "a b", "foo-", "foo..bar", ""])
def test_what_is_no_name_is_refused(tmp_path, name):
    told = made(tmp_path, name)
    assert told.exit_code == 1 and "lower-case words" in told.output
    assert not list(tmp_path.iterdir())


def test_the_name_of_a_known_method_is_refused(tmp_path):
    told = made(tmp_path, "draft-model")
    assert told.exit_code == 1 and "specdec-draft" in told.output


def test_what_is_there_is_not_overwritten(tmp_path):
    folder = tmp_path / "specdec-foo"
    folder.mkdir()
    (folder / "mine").write_text("mine")
    told = made(tmp_path, "foo")
    assert told.exit_code == 1 and "--into" in told.output
    assert [path.name for path in folder.iterdir()] == ["mine"]


def test_without_copier_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "copier", None)
    told = made(tmp_path, "foo")
    assert told.exit_code == 1 and "specdec-core[new-plugin]" in told.output
