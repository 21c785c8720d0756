"""A pytest plugin that tells of each failure as it happens: a run that is cut short has told what failed.

python -m pytest -p tests.instant_failures ...
"""

from __future__ import annotations

from typing import Any

#: Characters of a traceback that are shown: its end.
_SHOWN = 1500


def pytest_runtest_logreport(report: Any) -> None:
    if report.failed:
        print(f"\nFAILED {report.nodeid} ({report.when})\n{str(report.longrepr)[-_SHOWN:]}", flush=True)
