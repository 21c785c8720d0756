"""Writes docs/keywords.md from the table that the engine itself uses: ``python docs/make_keywords.py``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from specdecode.api.args import EngineFields
from specdecode.api.keywords import Foreign, foreign_keywords
from specdecode.api.legacy import OLD
from specdecode.config import ConfigField, fields_of
from specdecode.plugins.hints import not_methods, other_spellings

PAGE = Path(__file__).with_name("keywords.md")

HEAD = """\
# Keywords of LLM and EngineArgs

Made by `python docs/make_keywords.py`; a test compares it with the engine's table.

`LLM(...)`, `EngineArgs(...)` and the `--...` options of the command line take vLLM's names. A keyword
works, has no meaning here and is warned about once, or is refused with the reason. One that is in no
table is an error that names the nearest known one. `None` always asks for the default.
"""

WORKS = """
## Works

| keyword | type | default | what |
| --- | --- | --- | --- |
"""

FLAT_HEAD = """
`spec_method`, `spec_model` and `spec_tokens` say the keys `method`, `model` and
`num_speculative_tokens` of `speculative_config`, as on the command line.

## Old spellings

Accepted with one warning that prints the `speculative_config` to write instead. They are accepted as
keywords, and as keys inside `speculative_config`.

| old | key of `speculative_config` |
| --- | --- |
"""

METHODS = """
Methods by other names, as `method`, `model` or `speculative_model`:

| there | here |
| --- | --- |
"""

IGNORED = """
## Accepted without effect

Warned about once.

| keywords | why |
| --- | --- |
"""

REFUSED = """
## Refused

But for the values in the third column, which ask for nothing.

| keyword | why | accepted |
| --- | --- | --- |
"""


def page() -> str:
    """The whole of docs/keywords.md."""
    foreign = list(foreign_keywords().values())
    return "".join(
        (
            HEAD,
            WORKS,
            *map(_field, fields_of(EngineFields)),
            FLAT_HEAD,
            *(_row(f"`{old}`", f"`{key}`") for old, key in OLD.items()),
            METHODS,
            *(
                _row(f"`{name}`", f"`{spelling.method}`" + (f": {spelling.note}" if spelling.note else ""))
                for name, spelling in other_spellings().items()
            ),
            *(_row(f"`{name}`", f"refused: {reason}") for name, reason in not_methods().items()),
            IGNORED,
            *(_row(_names(group), why) for why, group in _by_reason(foreign, refused=False)),
            REFUSED,
            *(
                _row(f"`{keyword.name}`", why, ", ".join(f"`{value!r}`" for value in keyword.off))
                for why, group in _by_reason(foreign, refused=True)
                for keyword in group
            ),
        )
    )


def _field(field: ConfigField) -> str:
    default = "required" if field.required else f"`{field.default!r}`"
    return _row(f"`{field.name}`", f"`{field.type}`", default, field.doc)


def _by_reason(keywords: Iterable[Foreign], *, refused: bool) -> list[tuple[str, list[Foreign]]]:
    chosen = [keyword for keyword in keywords if keyword.refused is refused]
    return [(why, list(group)) for why, group in groupby(chosen, key=lambda keyword: keyword.why)]


def _names(keywords: Sequence[Foreign]) -> str:
    return ", ".join(f"`{keyword.name}`" for keyword in keywords)


def _row(*cells: Any) -> str:
    return f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in cells)} |\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
