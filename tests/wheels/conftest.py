"""Every distribution as a wheel, built once, and environments in which some of them are installed."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


def distributions() -> dict[str, Path]:
    """Name of a wheel -> the folder it is built from: every member of the workspace."""
    import tomllib

    workspace = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]["workspace"]
    folders = sorted(
        path.parent for glob in workspace["members"] for path in ROOT.glob(f"{glob}/pyproject.toml")
    )
    return {
        tomllib.loads((folder / "pyproject.toml").read_text())["project"]["name"].replace("-", "_"): folder
        for folder in folders
    }


@pytest.fixture(scope="session")
def wheels(tmp_path_factory) -> dict[str, Path]:
    """Name -> file."""
    out = tmp_path_factory.mktemp("wheels")
    for folder in distributions().values():
        command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, folder]
        subprocess.run(command, check=True, capture_output=True)
    return {path.name.split("-")[0]: path for path in out.glob("*.whl")}


@pytest.fixture(scope="session")
def third_party(tmp_path_factory) -> Path:
    """What this environment has from others, torch among it, and nothing of ours."""
    bare = tmp_path_factory.mktemp("third-party")
    for entry in Path(pytest.__file__).resolve().parent.parent.iterdir():
        if "specdec" not in entry.name.lower() and not entry.name.endswith(".pth"):
            (bare / entry.name).symlink_to(entry)
    return bare


@attrs.frozen
class Environment:
    """A folder of installed wheels, and Python with that and third-party packages alone."""

    site: Path
    third_party: Path

    def run(self, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        """``-S`` leaves out what this environment has installed; ``third_party`` puts part of it back."""
        path = os.pathsep.join([str(self.site), str(self.third_party)])
        variables = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "HF_HUB_OFFLINE": "1"}
        return subprocess.run(
            [sys.executable, "-S", *arguments],
            env={k: v for k, v in os.environ.items() if not k.startswith("SPECDECODE_")} | variables,
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=300,
        )

    def python(self, code: str, cwd: Path) -> str:
        done = self.run("-c", code, cwd=cwd)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def specdecode(self, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        """The command, as its entry point runs it."""
        return self.run("-c", "from specdecode.cli import main; main()", *arguments, cwd=cwd)

    def add(self, dist: str, module: str, source: str, *, requires: str = "specdec-core>=0.1,<1") -> None:
        """Install a plugin of one module, as a wheel of it would be."""
        (self.site / f"{module}.py").write_text(source)
        info = self.site / f"{dist.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.0\nRequires-Dist: {requires}\n"
        )
        (info / "entry_points.txt").write_text(
            f"[specdecode]\n{module.removeprefix('specdec_')} = {module}\n"
        )


@pytest.fixture
def install(wheels, third_party, tmp_path) -> Callable[..., Environment]:
    """An environment with some of the wheels. A wheel of Python alone is installed by unpacking it."""

    def make(*names: str) -> Environment:
        site = tmp_path / "site"
        for name in names:
            zipfile.ZipFile(wheels[name]).extractall(site)
        return Environment(site, third_party)

    return make
