"""Rows of measurements as text tables, narrow enough for a terminal and a log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs


@attrs.frozen
class Column:
    """A figure of a row. A format that ends in ``%`` shows a share."""

    key: str
    title: str
    form: str = ""

    def cell(self, row: Mapping[str, Any]) -> str:
        value = row.get(self.key)
        if value is None or value != value:
            return "-"
        return format(value, self.form) if self.form else str(value)


def table(title: str, columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> str:
    """``rows`` under ``title``; columns that no row has a value for are left out."""
    shown = [c for c in columns if any(row.get(c.key) is not None for row in rows)]
    cells = [[c.title for c in shown], *([c.cell(row) for c in shown] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    numeric = [any(isinstance(row.get(c.key), (int, float)) for row in rows) for c in shown]
    lines = [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in cells
    ]
    return "\n".join([f"\n{title}", lines[0], "-" * max(map(len, lines)), *lines[1:]])
