"""For all tests of the workspace."""

from __future__ import annotations

from collections import Counter

import pytest

#: Tests of a file from which on they stay together on one of several workers, and share what is dear to make:
#: engines and references. Workers take such files first, and share the other tests out one by one.
MANY = 20


@pytest.hookimpl(tryfirst=True)  # before xdist looks at the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Larger sweeps take hours: they run if they are asked for (``-m sweep``)."""
    if "sweep" not in config.option.markexpr:
        swept = [item for item in items if item.get_closest_marker("sweep")]
        config.hook.pytest_deselected(items=swept)
        items[:] = [item for item in items if item not in swept]
    if getattr(config.option, "loadgroup", False):  # a worker of ``--dist loadgroup``
        counts = Counter(item.path for item in items)
        for item in items:
            if counts[item.path] >= MANY and item.get_closest_marker("xdist_group") is None:
                folder, name = item.path.parent.relative_to(config.rootpath), item.path.stem
                item.add_marker(pytest.mark.xdist_group(f"{folder}/{name}"))
