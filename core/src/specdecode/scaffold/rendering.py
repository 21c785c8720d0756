"""Fill in the template."""

from __future__ import annotations

import re
from importlib.resources import as_file, files
from pathlib import Path

from specdecode.contract import API, ConfigError, SpecdecodeError
from specdecode.plugins.discovery import core_version
from specdecode.plugins.hints import known_methods

_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")


def new_plugin(name: str, folder: Path, *, author: str = "", summary: str = "") -> Path:
    """Write a distribution ``specdec-NAME`` that provides the method ``name``.

    What is written installs, drafts, and passes its own tests and the conformance kit as it is.

    Args:
        name: the method: lower-case words joined by ``-`` or ``_``.
        folder: where ``specdec-NAME`` is made; created if need be.
        author: who goes into the metadata; empty: nobody.
        summary: one line about the method.

    Returns:
        The new distribution's folder.

    Raises:
        ConfigError: the name is none, is taken by a method that is known, or the folder has something in it.
        SpecdecodeError: copier, which fills in the template, is not installed.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"name: {name!r} is not lower-case words joined by '-' or '_', such as 'retrieval'; a method's "
            "distribution and module are named after it"
        )
    method = name.replace("-", "_")
    if owner := known_methods().get(method):
        raise ConfigError(
            f"name: {name!r} is a method of {owner}; two distributions that claim one method are refused: "
            "choose another name"
        )
    try:
        from copier import run_copy
    except ImportError:
        raise SpecdecodeError(
            "the template is filled in by copier, which is not installed: "
            "pip install 'specdec-core[new-plugin]'"
        ) from None
    made = folder / f"specdec-{name}"
    if made.exists() and any(made.iterdir()):
        raise ConfigError(f"folder: {made} is not empty; choose another with --into, or remove it")
    answers = {
        "name": name.replace("_", "-"),
        "method": method,
        "module": method,
        "class_name": "".join(word.capitalize() for word in method.split("_")),
        "author": author,
        "summary": summary or "drafts what followed the last token when it occurred before",
        "api": API,
    }
    if version := core_version():
        answers["core"] = ".".join(version.split(".")[:2])
    with as_file(files("specdecode.scaffold").joinpath("template")) as template:
        run_copy(str(template), made, data=answers, defaults=True, quiet=True)
    return made
