"""A state machine of hypothesis over an engine: what a server may do to requests, in any order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import HealthCheck, Phase, Verbosity, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from .checks import Broken
from .groups.lifecycle import raised_by_itself

if TYPE_CHECKING:
    from .asks import Ask
    from .subject import Subject

#: Schedules, and operations of each.
_SCHEDULES = 8
_OPERATIONS = 28

_SETTINGS = settings(
    max_examples=_SCHEDULES,
    stateful_step_count=_OPERATIONS,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],  # a schedule is told in full; shrinking it would take minutes
    suppress_health_check=list(HealthCheck),
    verbosity=Verbosity.quiet,
    report_multiple_bugs=False,
    print_blob=False,
)


def run_machine(subject: Subject) -> None:
    """Try random schedules.

    Raises:
        Broken: the proposer raised; tells the schedule.
    """

    class Schedule(_Schedule):
        def __init__(self) -> None:
            super().__init__(subject)

    run_state_machine_as_test(Schedule, settings=_SETTINGS)


class _Schedule(RuleBasedStateMachine):
    def __init__(self, subject: Subject) -> None:
        super().__init__()
        self._subject = subject
        self._added: list[Ask] = []
        self._told: list[str] = []
        self._rig = subject.rig(num_gpu_blocks_override=30, max_num_batched_tokens=48, max_num_seqs=5)

    def _did(self, what: str) -> None:
        self._told.append(what)
        if raised := raised_by_itself(self._rig.log):
            raise Broken(f"{raised[0]}, after {', '.join(self._told)}")

    @initialize()
    def start(self) -> None:
        self.add(0)
        self.add(3)

    @rule(index=st.integers(0, 7))
    def add(self, index: int) -> None:
        ask = self._subject.toy.asks[index]
        named = ask.named(f"request-{len(self._added)}-{ask.key}")
        self._added.append(named)
        self._rig.add(named)
        self._did(f"add {named.key}")

    @rule(count=st.integers(1, 3))
    def step(self, count: int) -> None:
        for _ in range(count):
            self._rig.step()
        self._did(f"{count} steps")

    @rule(index=st.integers(0, 7), waiting=st.booleans())
    def abort(self, index: int, waiting: bool) -> None:
        """Of those that wait, preempted ones among them, or of those that run."""
        if names := self._rig.names(waiting=waiting):
            name = names[index % len(names)]
            self._rig.abort(name)
            self._did(f"abort {name}")

    @rule(index=st.integers(0, 7), for_good=st.booleans())
    def preempt(self, index: int, for_good: bool) -> None:
        """A running one; ``for_good``: it is aborted before it comes back."""
        if name := self._rig.preempt(index):
            self._did(f"preempt {name}")
            if for_good:
                self._rig.abort(name)
                self._did(f"abort {name}")

    @rule(by=st.integers(1, 4))
    def reorder(self, by: int) -> None:
        self._rig.rotate(by)
        self._did(f"rotate the rows by {by}")

    def teardown(self) -> None:
        self._rig.drain()
        self._did("drain")
        self._rig.close()
