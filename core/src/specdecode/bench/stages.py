"""Which stage of a step an engine is in, told without its knowing: its verbs are wrapped meanwhile."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import attrs

TARGET, VERIFY, DRAFT, HOST = "target", "verify", "draft", "host"
#: What a stage's range is called in a trace. Two more ranges: a step, and the forward of one that has
#: prompt tokens.
PREFIX = "specdecode:"
STEP, PREFILL = "step", "prefill"

#: The verbs of an engine's core, of its captured step and of the kernels under it, by stage. Where one calls
#: another, the inner one counts. What no verb of the table covers is the host's.
_CORE = {
    "_forward": TARGET,
    "_score_prompts": TARGET,
    "_verify": VERIFY,
    "_propose": DRAFT,
    "_draft": DRAFT,
    "_draft_on_host": DRAFT,
}
_STEADY = {"run": TARGET}
_SAMPLING = {"draw_tokens": VERIFY}
_VERIFICATION = {"next_inputs": VERIFY, "accept": VERIFY}


@attrs.frozen
class StepTime:
    """One step: seconds by stage, what came before it since the last step among the host's."""

    seconds: dict[str, float]
    prefill: bool


class Stages:
    """Wall-clock time of the stages, each without the stages inside it; and ranges in a running trace."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.steps: list[StepTime] = []
        self._clock = clock
        self._stack = [HOST]
        self._last = clock()
        self._seconds: dict[str, float] = {}
        self._prefill = False

    @contextlib.contextmanager
    def stage(self, name: str, *, prefill: bool = False) -> Iterator[None]:
        """Charge the time inside to ``name``."""
        self._prefill = self._prefill or prefill
        with _range(PREFILL if prefill else name):
            self._charge()
            self._stack.append(name)
            try:
                yield
            finally:
                self._charge()
                self._stack.pop()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """One step of the engine."""
        with _range(STEP):
            try:
                yield
            finally:
                self._charge()
                self.steps.append(StepTime(self._seconds, self._prefill))
                self._seconds, self._prefill = {}, False

    def _charge(self) -> None:
        now = self._clock()
        name = self._stack[-1]
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._last
        self._last = now


def _range(name: str) -> contextlib.AbstractContextManager[Any]:
    from torch.profiler import record_function

    return record_function(PREFIX + name)


@contextlib.contextmanager
def watched(core: Any, stages: Stages) -> Iterator[None]:
    """``core``'s steps are told to ``stages`` inside."""
    from specdec_kernels import sampling, verification

    with contextlib.ExitStack() as stack:
        stack.enter_context(_wrapped(core, "step", _in_step(stages)))
        tables = [(core, _CORE), (getattr(core, "steady", None), _STEADY)]
        tables += [(sampling, _SAMPLING), (verification, _VERIFICATION)]
        for owner, verbs in tables:
            for verb, name in verbs.items():
                drafts_not = name == DRAFT and getattr(core, "drafting", True) is None
                if hasattr(owner, verb) and not drafts_not:
                    stack.enter_context(_wrapped(owner, verb, _in_stage(stages, name)))
        yield


Around = Callable[..., contextlib.AbstractContextManager[None]]


def _in_step(stages: Stages) -> Around:
    return lambda *_, **__: stages.step()


def _in_stage(stages: Stages, name: str) -> Around:
    """``name``; a plan of rows that have prompt tokens, if the verb is given one, makes it a prefill."""

    def around(*arguments: Any, **_: Any) -> contextlib.AbstractContextManager[None]:
        rows = getattr(arguments[0], "rows", ()) if arguments and name == TARGET else ()
        prefill = isinstance(rows, list) and any(row.prefill for row in rows)
        return stages.stage(name, prefill=prefill)

    return around


@contextlib.contextmanager
def _wrapped(owner: Any, verb: str, around: Around) -> Iterator[None]:
    """``owner.verb`` runs inside ``around(its arguments)``."""
    inner = getattr(owner, verb)
    own = verb in vars(owner)

    @functools.wraps(inner)
    def outer(*arguments: Any, **keywords: Any) -> Any:
        with around(*arguments, **keywords):
            return inner(*arguments, **keywords)

    setattr(owner, verb, outer)
    try:
        yield
    finally:
        if own:
            setattr(owner, verb, inner)
        else:
            delattr(owner, verb)
