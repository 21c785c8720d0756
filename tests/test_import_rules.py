"""The import rules of docs/architecture.md, read from the sources. There is no list of exceptions."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from specdecode.plugins import PluginManager

ROOT = Path(__file__).resolve().parent.parent
CORE = ROOT / "core/src/specdecode"
KERNELS = ROOT / "kernels/src/specdec_kernels"
PLUGINS = sorted(path for path in ROOT.glob("plugins/*/src/specdec_*") if path.is_dir())
OURS = ("specdecode", "specdec_")

#: Rooms of core in which no method is named and no proposer is asked who it is.
BLIND = ("contract", "plugins", "config", "engine", "heads", "kv", "verify", "runner")


def sources(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def module_name(path: Path) -> str:
    package = next(parent for parent in path.parents if parent.name == "src")
    parts = path.relative_to(package).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def parsed(path: Path) -> ast.Module:
    source = path.read_text()
    try:
        return ast.parse(source)
    except SystemError:  # before Python 3.11.8, when another thread parses at the same time (gh-106905)
        return ast.parse(source)


def imports(path: Path) -> set[str]:
    """Absolute names of all modules a file imports, at the top or inside functions."""
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    found: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            head = ".".join([*base, *([node.module] if node.module else [])])
            found |= {head, *(f"{head}.{alias.name}" for alias in node.names)}
    return found


def inside(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def offenders(folder: Path, forbidden: callable) -> list[str]:
    return [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources(folder)
        for name in sorted(imports(path))
        if forbidden(name)
    ]


def test_there_is_something_to_look_at():
    assert len(sources(CORE)) > 50 and sources(KERNELS) and PLUGINS


def test_kernels_import_nothing_of_ours():
    assert not offenders(KERNELS, lambda name: name.startswith(OURS) and not inside(name, "specdec_kernels"))


def test_contract_imports_only_the_standard_library_and_attrs():
    def foreign(name: str) -> bool:
        return (
            not inside(name, "attrs", "specdecode.contract")
            and name.split(".")[0] not in sys.stdlib_module_names
        )

    assert not offenders(CORE / "contract", foreign)


def test_the_contract_is_short():
    lines = sum(
        bool(line.strip()) for path in sources(CORE / "contract") for line in path.read_text().splitlines()
    )
    assert lines <= 690, f"the contract has {lines} lines; an author reads all of it"


@pytest.mark.parametrize(
    ("room", "allowed"),
    [
        ("contract", ["contract"]),
        ("config", ["config", "contract"]),
        ("plugins", ["plugins", "contract", "config"]),
    ],
)
def test_rooms_that_import_few(room, allowed):
    packages = [f"specdecode.{name}" for name in allowed]
    assert not offenders(
        CORE / room,
        lambda name: name.startswith(OURS) and name != "specdecode" and not inside(name, *packages),
    )


@pytest.mark.parametrize(
    ("room", "forbidden"),
    [
        ("layers", ["engine", "api", "runner"]),
        ("heads", ["engine", "api", "runner"]),
        ("models", ["engine", "api", "runner"]),
        ("engine", ["plugins"]),
        ("kv", ["engine", "runner", "api"]),
        ("distributed", ["engine", "runner", "models", "layers", "kv"]),
        ("verify", ["engine", "runner"]),
    ],
)
def test_rooms_that_may_not_import(room, forbidden):
    packages = [f"specdecode.{name}" for name in forbidden]
    assert not offenders(CORE / room, lambda name: inside(name, *packages))


def test_nothing_imports_cli_and_only_cli_imports_testing():
    for path in sources(CORE):
        room = path.relative_to(CORE).parts[0]
        if room in ("cli", "testing"):
            continue
        names = imports(path)
        assert not any(inside(name, "specdecode.cli", "specdecode.testing") for name in names), path
    assert not offenders(CORE / "testing", lambda name: inside(name, "specdecode.cli"))


def test_only_cli_imports_serve():
    for path in sources(CORE):
        if path.relative_to(CORE).parts[0] not in ("serve", "cli"):
            assert not any(inside(name, "specdecode.serve") for name in imports(path)), path


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda path: path.name)
def test_draft_plugins_see_the_contract_and_building_blocks_only(plugin):
    allowed = (
        plugin.name,
        "specdecode.contract",
        "specdecode.plugins.hookimpl",
        "specdecode.models",
        "specdecode.layers",
        "specdecode.heads",
        "specdec_kernels",
        "specdec_train",  # of recipes, which are imported where it is installed
    )
    assert not offenders(
        plugin,
        lambda name: name.startswith(OURS) and name != "specdecode.plugins" and not inside(name, *allowed),
    )


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("specdecode", ("torch", "transformers")),
        ("specdecode.contract", ("torch", "numpy", "pluggy")),
        ("specdecode.plugins", ("torch", "numpy", "transformers")),
        ("specdecode.config", ("torch", "transformers")),
        ("specdecode.heads.config", ("torch", "numpy", "transformers")),
        ("specdecode.heads.vocabulary", ("torch", "transformers")),
        ("specdecode.kv", ("torch",)),
        ("specdecode.engine.scheduler", ("torch",)),
        ("specdecode.cli", ("torch", "transformers")),
        ("specdecode.serve.settings", ("torch", "transformers", "fastapi")),
        ("specdecode.bench.load", ("torch", "transformers", "httpx")),
        *[(f"{path.name}.plugin", ("torch", "transformers")) for path in PLUGINS],
    ],
)
def test_light_modules_stay_light(module, absent):
    code = f"import sys, {module}; print([name for name in {absent!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_blind_rooms_name_no_method():
    names = {record.method for record in PluginManager().methods()}
    hints = tomllib.loads((CORE / "hints.toml").read_text())["methods"]
    names |= set(hints) - {"auto", "extend"}  # English words until a plugin claims them
    assert "ngram" in names
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno} says {node.value!r}"
        for room in BLIND
        for path in sources(CORE / room)
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Constant) and node.value in names
    ]
    assert not found


def test_blind_rooms_never_ask_a_proposer_who_it_is():
    found = []
    for room in BLIND:
        for path in sources(CORE / room):
            for node in ast.walk(parsed(path)):
                if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
                    continue
                if (
                    node.func.id in ("isinstance", "issubclass", "hasattr")
                    and "proposer" in ast.unparse(node).lower()
                ):
                    if node.func.id == "isinstance" and ast.unparse(node.args[1]).endswith("ProposerSpec"):
                        continue  # what a plugin yields is checked to be a spec, not which
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    assert not found
