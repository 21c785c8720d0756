"""What a run of the kit found."""

from __future__ import annotations

import enum
import reprlib
from collections.abc import Iterable

import attrs

from ...contract import Needs


class Outcome(enum.StrEnum):
    """How one check ended."""

    PASSED = "passed"
    WARNED = "warned"  #: nothing is broken, but something should be looked at
    FAILED = "failed"
    NOT_APPLICABLE = "not applicable"
    EXPECTED_FAILURE = "expected failure"
    UNEXPECTED_PASS = "unexpected pass"

    @property
    def fault(self) -> bool:
        """Whether the run as a whole has failed."""
        return self in (Outcome.FAILED, Outcome.UNEXPECTED_PASS)


@attrs.frozen(kw_only=True)
class Result:
    """One check of one proposer."""

    id: str
    group: str
    promise: str
    outcome: Outcome
    detail: str = ""  #: what was seen or measured, or why the check does not apply


@attrs.frozen(kw_only=True)
class Header:
    """What was checked against what."""

    method: str
    distribution: str
    version: str
    core: str  #: version of specdec-core
    api: int  #: the contract number that the plugin was written for
    config: dict[str, object]
    needs: Needs


@attrs.frozen(kw_only=True)
class Report:
    """All results, in the order of the checks."""

    header: Header
    results: tuple[Result, ...]

    @property
    def ok(self) -> bool:
        """Whether no check failed, nor one that was expected to fail passed."""
        return not any(result.outcome.fault for result in self.results)

    def ids(self, *outcomes: Outcome) -> set[str]:
        """Ids of the checks that ended so."""
        return {result.id for result in self.results if result.outcome in outcomes}

    @property
    def failed(self) -> set[str]:
        """Ids of the checks that failed, expected or not."""
        return self.ids(Outcome.FAILED, Outcome.EXPECTED_FAILURE)

    def count(self, outcome: Outcome) -> int:
        return sum(result.outcome is outcome for result in self.results)

    @property
    def summary(self) -> str:
        """One line: how many checks ended in which way."""
        counts = [f"{count} {outcome}" for outcome in Outcome if (count := self.count(outcome))]
        return f"{self.header.method}: {', '.join(counts)}"

    def __str__(self) -> str:
        return "\n".join([*_header(self.header), "", *_lines(self.results), "", self.summary])


def _header(header: Header) -> Iterable[str]:
    provider = f"{header.distribution} {header.version}".rstrip()
    yield f"{header.method} of {provider}, contract api {header.api}"
    yield f"specdec-core {header.core}; config {reprlib.repr(header.config)}"
    changed = [
        f"{field.name}={getattr(header.needs, field.name)!r}"
        for field in attrs.fields(Needs)
        if field.default is attrs.NOTHING or getattr(header.needs, field.name) != field.default
    ]
    yield f"Needs({', '.join(changed)})"


def _lines(results: Iterable[Result]) -> Iterable[str]:
    for result in results:
        yield f"{result.outcome:16}  {result.id}" + (f": {result.detail}" if result.detail else "")
