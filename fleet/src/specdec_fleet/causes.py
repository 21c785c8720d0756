"""What went wrong, out of the tracebacks in which Ray tells it."""

from __future__ import annotations

import re

#: How a traceback begins to tell an exception; its frames and their lines are indented.
_TOLD = re.compile(r"^(?:(?:\w+\.)+[A-Z]\w*|[A-Z]\w*(?:Error|Exception)): (?=\S)", re.MULTILINE)


def cause_of(told: str) -> str:
    """The last exception of the tracebacks that Ray passes on as one text; that text if it has none."""
    if not (found := list(_TOLD.finditer(told))):
        return told
    last = found[-1]
    if last[0].startswith("specdecode."):  # one of ours says all there is to say, perhaps in several lines
        return told[last.end() :].strip()
    return told[last.start() :].splitlines()[0]
