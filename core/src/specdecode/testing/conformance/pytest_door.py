"""The kit under pytest: each check of each case a test of its own."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import attrs

from .checks import Check, all_checks
from .report import Outcome
from .running import refuse_unknown, run_check
from .subject import Case, Config, Subject


@attrs.frozen(eq=False)
class BoundCheck:
    """A check of one case; calling it passes, fails, skips with the reason, or xfails."""

    check: Check
    case: Case
    _subject: Any = attrs.field(repr=False)

    def __call__(self) -> None:
        import pytest

        result = run_check(self.check, self._subject(), self.case.expected_failures)
        if result.outcome is Outcome.NOT_APPLICABLE:
            pytest.skip(f"not applicable: {result.detail}")
        if result.outcome is Outcome.EXPECTED_FAILURE:
            pytest.xfail(result.detail)
        if result.outcome is Outcome.WARNED:
            import warnings

            warnings.warn(f"{self.check.id}: {result.detail}", stacklevel=2)
        if result.outcome is Outcome.PASSED and result.detail:
            print(f"{self.check.id}: {result.detail}")  # seen with -rP
        if result.outcome.fault:
            pytest.fail(f"{self.check.id} ({self.check.promise!r}): {result.detail}", pytrace=False)


def parametrize_with_checks(cases: Iterable[Case | tuple[str, Config]]) -> Any:
    """Decorate ``def test_conformance(check): check()`` to run every check of every case.

    Args:
        cases: :class:`Case` objects, or pairs of a method and its keys of ``speculative_config``.
            Preparing one is left to its first check, so collecting tests costs nothing.

    Raises:
        ConfigError: an expected failure names no check.
    """
    import pytest

    parameters = []
    for index, given in enumerate(cases):
        case = Case.of(given)
        refuse_unknown(case.expected_failures)
        subject = functools.cache(functools.partial(Subject, case))
        parameters += [
            pytest.param(BoundCheck(check, case, subject), id=f"{case.method}-{index}-{check.id}")
            for check in all_checks()
        ]
    return pytest.mark.parametrize("check", parameters)
