"""The ``specdecode`` command."""

from __future__ import annotations


def main() -> None:
    """Entry point of the command; ends the process with status 0, 1 (an error) or 2 (wrong usage)."""
    from .app import app

    app()
