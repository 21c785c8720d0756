"""The scripted proposers reach the engine as an installed plugin's do."""

from __future__ import annotations

import subprocess
import sys

import pytest
from specdecode.config.fields import fields_of
from specdecode.plugins import PluginManager
from specdecode.plugins.records import Status
from specdecode.testing import scripted

METHODS = (
    "scripted-cascade",
    "scripted-eagle",
    "scripted-faulty",
    "scripted-flaky",
    "scripted-liar",
    "scripted-medusa",
    "scripted-oracle",
    "scripted-oracle-tree",
    "scripted-ragged",
    "scripted-recorder",
    "scripted-sampler",
    "scripted-self-draft",
    "scripted-small-draft",
    "scripted-wrong",
)


@pytest.fixture
def manager():
    return PluginManager(allow=())


def test_all_are_there_and_well(manager):
    scripted.install(manager)
    records = {record.method: record.status for record in manager.methods()}
    assert records == dict.fromkeys(METHODS, Status.OK)


def test_installing_twice_changes_nothing(manager):
    scripted.install(manager)
    before = manager.records
    scripted.install(manager)
    assert manager.records == before


@pytest.mark.parametrize("method", METHODS)
def test_every_key_is_documented(manager, method):
    scripted.install(manager)
    fields = fields_of(manager.resolve(method).spec.config)
    assert fields and all(field.doc for field in fields)


def test_listing_imports_no_torch():
    code = (
        "import sys; from specdecode.plugins import PluginManager; from specdecode.testing import scripted;"
        "manager = PluginManager(allow=()); scripted.install(manager); manager.methods();"
        "sys.exit(bool({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
