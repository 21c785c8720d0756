"""Runs checks: the one way behind all three doors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ... import __version__
from ...contract import ConfigError
from ...plugins import PluginManager
from .checks import Broken, Check, NotApplicable, Note, all_checks
from .report import Header, Outcome, Report, Result
from .subject import Case, Config, Subject


def check_proposer(
    method: str,
    config: Config | None = None,
    *,
    target: str | Path | None = None,
    device: str = "cpu",
    ranks: int = 1,
    expected_failures: Mapping[str, str] | None = None,
    manager: PluginManager | None = None,
    started: Callable[[Check], None] = lambda check: None,
) -> Report:
    """Try every promise of the contract on one method.

    Args:
        method: name of an installed or registered method.
        config: its keys of ``speculative_config``, or a function from the kit's :class:`Toy` to them.
        target: checkpoint to speculate for; None: the kit's own tiny one.
        device: torch device. Runs are compared to the bit, in float32; on a GPU other shapes round otherwise
            and may part two near-equal candidates.
        ranks: that share the target, as threads of this process, on a CPU.
        expected_failures: check id -> reason, of checks that are known to fail. One that passes is a fault.
        manager: who knows the method; None: the process's.
        started: called before each check, for progress.

    Raises:
        ConfigError, Unsupported, PluginError: the method cannot be used so, or an id is no check's.
    """
    case = Case(
        method=method,
        config=config or {},
        target=target,
        device=device,
        ranks=ranks,
        expected_failures=expected_failures or {},
        manager=manager,
    )
    refuse_unknown(case.expected_failures)
    subject = Subject(case)
    results = []
    for check in all_checks():
        started(check)
        results.append(run_check(check, subject, case.expected_failures))
    return Report(header=header_of(subject), results=tuple(results))


def run_check(check: Check, subject: Subject, expected_failures: Mapping[str, str]) -> Result:
    """One check; what it raises becomes its result."""
    outcome, detail = _outcome(check, subject)
    if check.id in expected_failures:
        reason = expected_failures[check.id]
        if outcome is Outcome.FAILED:
            outcome, detail = Outcome.EXPECTED_FAILURE, f"{reason} ({detail})"
        elif outcome is not Outcome.NOT_APPLICABLE:
            outcome, detail = Outcome.UNEXPECTED_PASS, f"expected to fail: {reason}"
    return Result(id=check.id, group=check.group, promise=check.promise, outcome=outcome, detail=detail)


def _outcome(check: Check, subject: Subject) -> tuple[Outcome, str]:
    if subject.spec.api < check.api:
        return Outcome.NOT_APPLICABLE, f"promised since contract api {check.api}"
    if reason := check.applies(subject.needs):
        return Outcome.NOT_APPLICABLE, reason
    try:
        told = check.run(subject)
    except NotApplicable as reason:
        return Outcome.NOT_APPLICABLE, str(reason)
    except Broken as broken:
        return Outcome.FAILED, str(broken)
    except Exception as error:  # a proposer may break the kit's engines in any way
        return Outcome.FAILED, f"{type(error).__name__}: {error}"
    if isinstance(told, Note):
        return Outcome.PASSED, str(told)
    return (Outcome.WARNED, told) if told else (Outcome.PASSED, "")


def refuse_unknown(expected_failures: Mapping[str, Any]) -> None:
    """Refuse ids that no check has: nothing would hold them to anything.

    Raises:
        ConfigError: names them.
    """
    known = {check.id for check in all_checks()}
    if unknown := sorted(set(expected_failures) - known):
        raise ConfigError(
            f"expected_failures names {', '.join(unknown)}, which no check is; the checks are "
            f"{', '.join(sorted(known))}"
        )


def header_of(subject: Subject) -> Header:
    """What is being checked against what."""
    provided = subject.prepared.provided
    return Header(
        method=provided.spec.name,
        distribution=provided.dist,
        version=provided.version,
        core=__version__,
        api=provided.spec.api,
        config=subject.config,
        needs=subject.needs,
    )
