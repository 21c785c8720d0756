"""What drafting costs. Nothing here can fail: it is reported."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

import attrs
import torch

from ....contract import Drafts, Proposer, StepView
from ...scripted.wrapping import WrappingProposer
from ..checks import Group, Note

if TYPE_CHECKING:
    from ..subject import Subject

GROUP = Group("cost", order=120)


@attrs.frozen
class _Call:
    """One call of ``propose``."""

    seconds: float
    rows: int


class _Timed(WrappingProposer):
    """Times each call of ``propose``; on a GPU it waits for the device before and after."""

    def __init__(self, inner: Proposer) -> None:
        super().__init__(inner)
        self.calls: list[_Call] = []

    def propose(self, step: StepView, out: Drafts) -> None:
        began = _now(out)
        self.inner.propose(step, out)
        self.calls.append(_Call(_now(out) - began, len(out.lens)))


def _now(out: Drafts) -> float:
    if isinstance(out.lens, torch.Tensor) and out.lens.is_cuda:
        torch.cuda.synchronize(out.lens.device)
    return time.perf_counter()


@GROUP.check("told", "What drafting costs is told, never judged.")
def told(subject: Subject) -> str | None:
    """Time of ``propose``, and bytes that the proposer holds, on the kit's small model."""
    from ..driving import Rig
    from ..footprint import size_bytes

    made: list[_Timed] = []

    def wrap(proposer: Proposer) -> Proposer:
        made.append(_Timed(proposer))
        return made[-1]

    with Rig.bare(subject.toy, subject.mapping, subject.manager, wrap) as rig:
        began = time.perf_counter()
        rig.generate(subject.toy.asks)
        whole = time.perf_counter() - began
        (timed,) = made
        held = size_bytes(timed.inner)
    seconds = [call.seconds for call in timed.calls]
    if not seconds:
        return Note(f"propose was not called; {held} bytes held")
    rows = statistics.mean(call.rows for call in timed.calls)
    kv = sum(spec.layers * spec.heads * (spec.k_dim + spec.v_dim) for spec in subject.needs.kv)
    return Note(
        f"propose takes {1e3 * statistics.median(seconds):.2f} ms a call of {rows:.1f} rows "
        f"({len(seconds)} calls, {sum(seconds) / whole:.0%} of the run); {held} bytes held after 8 requests, "
        f"the target's parts it borrows included; {kv} numbers of draft KV a token"
    )
