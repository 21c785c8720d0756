"""The manual: it builds without a warning, its Python runs, its commands exist."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
import specdecode.contract
import typer
from specdecode.cli.app import app

sybil = pytest.importorskip("sybil")
from sybil.parsers.markdown import PythonCodeBlockParser  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path
    for path in [
        ROOT / "README.md",
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("*/README.md"),
        *ROOT.glob("plugins/*/README.md"),
        *ROOT.glob("heads/*/README.md"),
    ]
    if path.name != "plugins.md"  # the guide is followed step by step in test_guide.py
)
#: Of the contract's classes: core's side of a view.
UNDOCUMENTED = {"StepSource"}
#: Lines of commands: indented or fenced, perhaps behind a prompt, perhaps going on behind a backslash.
COMMAND = re.compile(r"^(?:    )?(?:\$ )?(specdecode (?:[^\n\\]|\\\n)*)", re.MULTILINE)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(path: Path) -> list:
    return list(sybil.Document.parse(str(path), PythonCodeBlockParser()).examples())


def commands(path: Path) -> list[str]:
    return [" ".join(found.replace("\\\n", " ").split()) for found in COMMAND.findall(path.read_text())]


@pytest.mark.skipif(
    "mkdocs" not in sys.modules and not __import__("importlib.util").util.find_spec("mkdocs"),
    reason="no mkdocs",
)
def test_it_builds_and_every_link_leads_somewhere(tmp_path):
    # Not with --quiet, under which --strict counts no warnings.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    reference = (tmp_path / "reference" / "index.html").read_text()
    classes = [name for name, value in vars(specdecode.contract).items() if isinstance(value, type)]
    documented = set(re.findall(r'id="specdecode\.contract\.(?:config\.)?(\w+)"', reference))
    assert len(classes) > 30 and not {name for name in classes if name not in UNDOCUMENTED} - documented


def test_the_readme_names_every_page():
    readme = (ROOT / "README.md").read_text()
    pages = [
        path.name for path in (ROOT / "docs").glob("*.md") if path.name != "index.md"
    ]  # which it is itself
    assert [name for name in pages if f"(docs/{name})" not in readme and f"(docs/{name}#" not in readme] == []


def test_every_method_has_a_page_and_a_place_in_the_choice():
    pages = "".join(path.read_text() for path in ROOT.glob("docs/methods/*.md"))
    choice = (ROOT / "docs/choosing.md").read_text()
    for plugin in sorted(ROOT.glob("plugins/*/src/*/plugin.py")):
        folder = plugin.relative_to(ROOT / "plugins").parts[0]
        assert f'"plugins/{folder}/README.md"' in pages
        methods = re.findall(r'^        name="(\w+)"', plugin.read_text(), re.MULTILINE)
        assert methods and all(f"`{method}`" in choice for method in methods), methods


@pytest.mark.parametrize("path", [p for p in PAGES if blocks(p)], ids=name)
def test_its_python_runs(path, staged, monkeypatch, tmp_path, request):
    if "import openai" in path.read_text():
        request.getfixturevalue("openai_client")
    monkeypatch.chdir(tmp_path)
    for example in blocks(path):
        example.document.namespace.update(
            {k: v for k, v in staged.items() if k not in example.document.namespace}
        )
        example.evaluate()


@pytest.mark.parametrize("path", [p for p in [*PAGES, ROOT / "docs/plugins.md"] if commands(p)], ids=name)
def test_its_commands_exist(path):
    for line in commands(path):
        words = shlex.split(line.replace("[", "").replace("]", ""), comments=True)[1:]
        command, context = typer.main.get_command(app), None
        try:
            while isinstance(command, click.Group) and words:
                context = click.Context(command, parent=context)
                _, command, words = command.resolve_command(context, words)
                assert command is not None
            command.make_context(line, words, parent=context)
        except click.exceptions.Exit:
            pass  # --help and the like
        except click.UsageError as error:
            pytest.fail(f"{line}: {error.format_message()}")
