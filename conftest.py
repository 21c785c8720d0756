"""For all tests of the workspace."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Larger sweeps take hours: they run if they are asked for (``-m sweep``)."""
    if "sweep" not in config.option.markexpr:
        swept = [item for item in items if item.get_closest_marker("sweep")]
        config.hook.pytest_deselected(items=swept)
        items[:] = [item for item in items if item not in swept]
