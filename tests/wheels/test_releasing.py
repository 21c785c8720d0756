"""What a release goes by names every distribution: workflow, matrix, changelog, and their bounds."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
WORKFLOWS = ROOT / ".github/workflows"


def projects() -> dict[Path, dict]:
    """Folder -> ``[project]`` of its ``pyproject.toml``, of the members of the workspace."""
    read = {path.parent: tomllib.loads(path.read_text()) for path in ROOT.glob("**/pyproject.toml")
            if ".venv" not in path.parts}  # fmt: skip
    globs = read[ROOT]["tool"]["uv"]["workspace"]["members"]
    folders = sorted(path for glob in globs for path in ROOT.glob(glob) if path in read)
    return {folder: read[folder]["project"] for folder in folders}


PROJECTS = projects()


def chosen(tag: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """The workflow's own step that finds a tag's folder."""
    yaml = pytest.importorskip("yaml")
    steps = yaml.safe_load((WORKFLOWS / "release.yml").read_text())["jobs"]["build"]["steps"]
    (script,) = [step["run"] for step in steps if step.get("id") == "tag"]
    environment = {"GITHUB_REF_NAME": tag, "GITHUB_OUTPUT": str(tmp_path / "output")}
    path = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    return subprocess.run(
        ["bash", "-e", "-c", script], cwd=ROOT, env=environment | path, capture_output=True, text=True
    )


def test_a_tag_of_each_distribution_finds_its_folder(tmp_path):
    for project in PROJECTS.values():
        done = chosen(f"{project['name']}-v{project['version']}", tmp_path)
        assert done.returncode == 0, done.stderr
    told = (tmp_path / "output").read_text().split()
    assert told[1::2] == [f"folder={folder.relative_to(ROOT)}" for folder in PROJECTS]
    assert told[::2] == [f"distribution={project['name']}" for project in PROJECTS.values()]


@pytest.mark.parametrize("tag", ["specdec-core-v9.9", "specdec-nobody-v0.1.0", "specdec-retrieval-v0.1.0"])
def test_another_tag_publishes_nothing(tag, tmp_path):
    assert chosen(tag, tmp_path).returncode != 0


def test_publishing_holds_no_token():
    yaml = pytest.importorskip("yaml")
    publish = yaml.safe_load((WORKFLOWS / "release.yml").read_text())["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"} and publish["needs"] == "build"
    assert "password" not in str(publish) and "token:" not in str(publish)


def test_versions_are_in_the_changelog_and_the_matrix():
    changelog, matrix = ((ROOT / name).read_text() for name in ("CHANGELOG.md", "docs/compatibility.md"))
    for project in PROJECTS.values():
        assert f"\n## {project['version']}" in changelog, project["name"]
        assert f"| {project['version'].rpartition('.')[0]} |" in matrix, project["name"]
        assert f"`{project['name']}`" in changelog or project["name"] in matrix, project["name"]


def test_the_matrix_tells_the_contract_and_what_the_distributions_require():
    from specdecode.contract import API

    rows = re.findall(r"^\|(.*)\|$", (ROOT / "docs/compatibility.md").read_text(), re.MULTILINE)
    head, row = ([cell.strip() for cell in line.split("|")] for line in (rows[0], rows[-1]))
    told = dict(zip(head, row, strict=True))
    assert told["contract"] == str(API)
    core = next(project for project in PROJECTS.values() if project["name"] == "specdec-core")
    for name in ("torch", "transformers"):
        (bound,) = [r for r in core["dependencies"] if re.match(rf"{name}\b", r)]
        assert re.search(r">=([0-9.]+)", bound)[1] in told[name], (name, bound)
    assert {project["requires-python"] for project in PROJECTS.values()} == {">=3.11"}


def test_the_distributions_bound_each_other_on_both_sides():
    names = {project["name"] for project in PROJECTS.values()}
    for project in PROJECTS.values():
        for requirement in project.get("dependencies", []):
            name = re.match(r"[a-z0-9-]+", requirement)[0]
            if name in names:
                assert re.search(r">=0\.\d+.*,<1$", requirement), (project["name"], requirement)


#: Imported, and not required by name: what comes with a requirement, and what is used where it is there.
BROUGHT = {
    "huggingface_hub": "by transformers",
    "tokenizers": "by transformers",
    "starlette": "by fastapi",
    "triton": "by torch, on a GPU",
    "opentelemetry": "by whoever sets up traces",
    "specdec_train": "by whoever trains: recipes are imported there alone",
}
#: Distributions whose modules have other names.
IMPORTED_AS = {"specdec_core": "specdecode", "pillow": "PIL"}


@pytest.mark.parametrize("folder", PROJECTS, ids=lambda folder: PROJECTS[folder]["name"])
def test_what_is_imported_is_required_and_the_other_way_round(folder):
    project = PROJECTS[folder]

    def modules(requirements: list[str]) -> set[str]:
        names = {re.match(r"[a-z0-9-]+", requirement)[0].replace("-", "_") for requirement in requirements}
        return {IMPORTED_AS.get(name, name) for name in names}

    needed = modules(project["dependencies"])
    optional = modules([one for extra in project.get("optional-dependencies", {}).values() for one in extra])
    found: set[str] = set()
    for path in (folder / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add(node.module.split(".")[0])
    (package,) = (path.name for path in (folder / "src").iterdir() if path.is_dir())
    found -= sys.stdlib_module_names | {package}
    assert found - needed - optional - set(BROUGHT) == set()
    assert needed - found == set()
