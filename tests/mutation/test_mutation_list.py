"""The list of deliberate faults fits the sources: it cannot rot unseen."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _module():
    spec = importlib.util.spec_from_file_location(
        "check_mutations", Path(__file__).with_name("check_mutations.py")
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


MUTATIONS = _module().mutations()


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_fault_stands_once_and_its_test_exists(mutation):
    assert (ROOT / mutation.file).read_text(encoding="utf-8").count(mutation.old) == 1
    assert mutation.new != mutation.old
    for part in mutation.test.split():
        if not part.startswith("-"):
            file, *names = part.split("::")
            text = (ROOT / file).read_text(encoding="utf-8")
            assert all(f"def {name.split('[')[0]}" in text for name in names)


def test_there_are_enough_and_all_parts_are_covered():
    assert len(MUTATIONS) >= 20
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)
    for part in ("verify/", "sampling/", "engine/scheduler", "kv/"):
        assert any(part in mutation.file for mutation in MUTATIONS), part
