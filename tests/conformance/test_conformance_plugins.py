"""What the kit finds before a proposer is built: in a distribution, its config class and its needs."""

from __future__ import annotations

import itertools
import sys

import attrs
import importlib_metadata
import pytest
from specdecode.contract import API, LengthFields, Needs, Proposer, ProposerSpec, Tokens, option
from specdecode.plugins import PluginManager, hookimpl
from specdecode.testing.conformance import Case, Outcome, Subject, all_checks
from specdecode.testing.conformance.running import run_check

LIGHT = ("packaging", "config", "needs")


class Idle(Proposer):
    def propose(self, step, out):
        return None


def chain(config, ctx):
    return Needs(width=4, depth=4, tokens=Tokens.NONE)


def manager_of(config=LengthFields, needs=chain):
    """A manager that knows one method, ``odd``."""

    class Plugin:
        @hookimpl
        def specdecode_proposers(self):
            yield ProposerSpec(
                name="odd", summary="", api=API, config=config, needs=needs, build=lambda config, ctx: Idle()
            )

    manager = PluginManager(allow=())
    manager.register(Plugin(), name="odd")
    return manager


def light_checks(manager, method="odd", config=None):
    """Outcome of each check that builds nothing."""
    subject = Subject(Case(method=method, config=config or {"num_speculative_tokens": 4}, manager=manager))
    return {check.id: run_check(check, subject, {}) for check in all_checks() if check.group in LIGHT}


def failed(results):
    return {name for name, result in results.items() if result.outcome is Outcome.FAILED}


# -- config ----------------------------------------------------------------------------------------
@attrs.frozen(kw_only=True)
class Undocumented(LengthFields):
    window: int = 3


@attrs.define(kw_only=True)
class Mutable:
    num_speculative_tokens: int = option("drafts a step")


@attrs.frozen
class Positional:
    num_speculative_tokens: int = attrs.field(metadata={"doc": "drafts a step"})


@attrs.frozen(kw_only=True)
class Growing:
    num_speculative_tokens: int = attrs.field(converter=lambda n: n + 1, metadata={"doc": "drafts a step"})


def _looked_up(instance, attribute, value):
    {4: "four"}[value]


@attrs.frozen(kw_only=True)
class Raising:
    num_speculative_tokens: int = option("drafts a step", validator=_looked_up)


@pytest.mark.parametrize(
    ("config", "check"),
    [
        (LengthFields, None),
        (Undocumented, "config.documented"),
        (Mutable, "config.frozen"),
        (Positional, "config.frozen"),
        (Growing, "config.round-trip"),
        (Raising, "config.faults-together"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_config_classes(config, check):
    results = light_checks(manager_of(config=config))
    assert failed(results) == ({check} if check else set())
    assert all(
        result.outcome is Outcome.NOT_APPLICABLE for result in results.values() if result.group == "packaging"
    )


def test_a_core_that_passes_over_unknown_keys_is_seen(monkeypatch):
    from specdecode.testing.conformance.groups import config as group

    real = group.structure
    monkeypatch.setattr(
        group,
        "structure",
        lambda kind, mapping, path: real(
            kind, {k: v for k, v in mapping.items() if k != group._NOBODYS}, path
        ),
    )
    assert failed(light_checks(manager_of())) == {"config.unknown-key-refused", "config.faults-together"}


# -- needs -----------------------------------------------------------------------------------------
def importing(config, ctx):
    import torch

    return Needs(width=4, depth=4, scratch_bytes=torch.zeros(1).nbytes)


def counting():
    serial = itertools.count()
    return lambda config, ctx: Needs(width=4, depth=4, scratch_bytes=next(serial))


def two_layers(config, ctx):
    return Needs(width=4, depth=4, scratch_bytes=8 // (ctx.target.num_layers - 1))


@pytest.mark.parametrize(
    ("needs", "check"),
    [
        (importing, "needs.torch-free"),
        (counting(), "needs.pure"),
        (two_layers, "needs.refuses-with-a-reason"),
    ],
    ids=["importing", "counting", "two-layers"],
)
def test_needs(needs, check):
    assert failed(light_checks(manager_of(needs=needs))) == {check}


# -- packaging -------------------------------------------------------------------------------------
PLUGIN = """
from specdecode.contract import LengthFields, Needs, Proposer, ProposerSpec
from specdecode.plugins import hookimpl

class Idle(Proposer):
    def propose(self, step, out):
        return None

@hookimpl
def specdecode_proposers():
    yield ProposerSpec(
        name="acme", summary="", api=1, config=LengthFields,
        needs=lambda config, ctx: Needs(width=WIDTH, depth=WIDTH), build=lambda config, ctx: Idle(),
    )
"""


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A function that writes a distribution ``acme`` and gives a manager that has loaded it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("SPECDECODE_PLUGINS", raising=False)

    def write(head="", requires=("specdec-core>=0.1,<1",), entry="acme"):
        info = tmp_path / "acme-1.0.dist-info"
        info.mkdir()
        lines = ["Metadata-Version: 2.1", "Name: acme", "Version: 1.0"]
        lines += [f"Requires-Dist: {requirement}" for requirement in requires]
        (info / "METADATA").write_text("\n".join(lines) + "\n")
        (info / "entry_points.txt").write_text(f"[specdecode]\n{entry} = acme_conformance_plugin\n")
        (tmp_path / "acme_conformance_plugin.py").write_text(f"WIDTH = 4\n{head}{PLUGIN}")
        importlib_metadata.MetadataPathFinder.invalidate_caches()
        return PluginManager(allow=("acme",))

    yield write
    sys.modules.pop("acme_conformance_plugin", None)


@pytest.mark.parametrize(
    ("distribution", "check"),
    [
        ({}, None),
        ({"head": "import torch\n"}, "packaging.light-import"),
        ({"requires": ["specdec-core>=0.1"]}, "packaging.bounded-core-range"),
        ({"requires": []}, "packaging.bounded-core-range"),
        ({"entry": "Acme Drafts"}, "packaging.entry-name"),
        ({"head": "import sys\nWIDTH += 'pytest' in sys.modules\n"}, "packaging.resolved-again"),
    ],
    ids=["good", "heavy", "unbounded", "no-requirement", "odd-name", "another-elsewhere"],
)
def test_packaging(site, distribution, check):
    results = light_checks(site(**distribution), "acme")
    assert failed(results) == ({check} if check else set())
