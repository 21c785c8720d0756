"""Distributions that exist in a temporary directory only: dist-info, entry points and modules."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import importlib_metadata
import pytest
from specdecode.contract import TargetInfo
from specdecode.plugins import PluginManager, PluginRecord

#: A plugin module as an author would write it; METHODS, API and IMPORTS are put in front of it.
PLUGIN = """
import attrs
from specdecode.contract import LengthFields, Match, Needs, Proposer, ProposerSpec, option
from specdecode.plugins import hookimpl

@attrs.frozen(kw_only=True)
class Config(LengthFields):
    window: int = option("tokens to look at", default=3)

class Idle(Proposer):
    def propose(self, step, out):
        return None

def recognize(checkpoint):
    return Match(f"model_type {NAME}") if checkpoint.config.get("model_type") == NAME else None

@hookimpl
def specdecode_proposers():
    for name in METHODS:
        yield ProposerSpec(
            name=name,
            summary=f"drafts of {name}",
            api=API,
            config=Config,
            needs=lambda config, ctx: Needs(
                width=config.num_speculative_tokens, depth=config.num_speculative_tokens
            ),
            build=lambda config, ctx: Idle(),
            imports=IMPORTS,
            recognize=recognize,
        )
"""


class Site:
    """A directory on ``sys.path`` into which distributions are written."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(
        self,
        dist: str,
        *,
        version: str = "1.0",
        entries: Mapping[str, str],
        files: Mapping[str, str] | None = None,
        requires: Sequence[str] = ("specdec-core>=0.1,<1",),
        metadata: bool = True,
        entry_points: str | None = None,
    ) -> None:
        """Write a distribution; ``files`` are modules by path below the site."""
        info = self.path / f"{dist.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        if metadata:
            lines = ["Metadata-Version: 2.1", f"Name: {dist}", f"Version: {version}"]
            lines += [f"Requires-Dist: {requirement}" for requirement in requires]
            (info / "METADATA").write_text("\n".join(lines) + "\n")
        listed = "\n".join(f"{name} = {target}" for name, target in entries.items())
        (info / "entry_points.txt").write_text(
            f"[specdecode]\n{listed}\n" if entry_points is None else entry_points
        )
        for name, text in (files or {}).items():
            file = self.path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(textwrap.dedent(text))
        importlib_metadata.MetadataPathFinder.invalidate_caches()

    def add_plugin(
        self,
        dist: str,
        *,
        methods: Sequence[str],
        family: str | None = None,
        version: str = "1.0",
        api: int | str = 1,
        imports: Sequence[str] = (),
        requires: Sequence[str] = ("specdec-core>=0.1,<1",),
        extra: str = "",
    ) -> None:
        """Write a plugin without faults, apart from those that the arguments make."""
        family = family or methods[0]
        module = dist.replace("-", "_")
        head = f"NAME = {family!r}\nMETHODS = {list(methods)!r}\nAPI = {api}\nIMPORTS = {tuple(imports)!r}\n"
        self.add(
            dist,
            version=version,
            entries={family: f"{module}.plugin"},
            files={
                f"{module}/__init__.py": "",
                f"{module}/plugin.py": head + PLUGIN + textwrap.dedent(extra),
            },
            requires=requires,
        )


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """An empty site on ``sys.path``; what was imported from it is forgotten afterwards."""
    for variable in ("SPECDECODE_PLUGINS", "SPECDECODE_STRICT_PLUGINS"):
        monkeypatch.delenv(variable, raising=False)
    path = tmp_path / "site"
    path.mkdir()
    monkeypatch.syspath_prepend(str(path))
    yield Site(path)
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(str(path)):
            del sys.modules[name]


@pytest.fixture
def good(site: Site) -> Site:
    """A site that holds one plugin without faults: method ``good`` of ``acme-good``."""
    site.add_plugin("acme-good", methods=["good"])
    return site


@pytest.fixture
def target() -> TargetInfo:
    return TargetInfo(
        path="target",
        architecture="LlamaForCausalLM",
        vocab_size=300,
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_model_len=256,
        dtype="float32",
        device="cpu",
    )


def record_of(manager: PluginManager, dist: str) -> PluginRecord:
    """The only record of a distribution."""
    (record,) = (record for record in manager.records if record.dist == dist)
    return record


@pytest.fixture(name="record_of")
def record_of_fixture():
    return record_of
