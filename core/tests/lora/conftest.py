from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def lab(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from specdecode.testing.adapters import AdapterLab

    lab = AdapterLab(tmp_path_factory.mktemp("adapters"), tiny_target)
    yield lab
    lab.close()
