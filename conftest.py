"""For all tests of the workspace."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

#: Tests of a file from which on they stay together, on one of several workers.
MANY = 20
#: Few tests that share what takes long to make: these files, or all of a folder.
SHARING = (
    "tests/manual/test_guide.py",
    "tests/test_gpu_benchmarks.py",
    "tests/test_lossless_model.py",
    "tests/wheels/",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Larger sweeps take hours: they run if they are asked for (``-m sweep``)."""
    if "sweep" not in config.option.markexpr:
        swept = [item for item in items if item.get_closest_marker("sweep")]
        config.hook.pytest_deselected(items=swept)
        items[:] = [item for item in items if item not in swept]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """``--dist loadgroup``: tests that share engines and references stay together, all others go one by one.

    Workers take the largest groups first. xdist's own goes by marks that it writes into the tests' ids, which
    pytest 9 does not let it change.
    """
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        _counts: Counter[str] | None = None

        def _split_scope(self, nodeid: str) -> str:
            if self._counts is None:
                self._counts = Counter(other.partition("::")[0] for other in self.collection)
            file = nodeid.partition("::")[0]
            sharing = next((name for name in SHARING if file.startswith(name)), None)
            return sharing or (file if self._counts[file] >= MANY else nodeid)

    return Scheduling(config, log)
