"""Errors that cross the line between core, plugins and users."""

from __future__ import annotations

#: What plugin code raises by a fault of its own, ``sys.exit()`` too. Ctrl-C is the user's, and goes through.
FAULTS = (Exception, SystemExit)


class SpecdecodeError(Exception):
    """Base of all errors this project raises on purpose."""


class ConfigError(SpecdecodeError, ValueError):
    """Bad configuration: every fault of it, each naming field, value and remedy."""

    def __init__(self, *faults: str) -> None:
        self.faults = faults
        super().__init__(faults[0] if len(faults) == 1 else "\n".join(f"- {f}" for f in faults))


class Unsupported(SpecdecodeError):
    """A combination that cannot work; the message says why and what would."""


class Undeclared(SpecdecodeError, AttributeError):
    """A proposer read something of its :class:`StepView` that its :class:`Needs` did not declare."""
