"""Whether a proposer on the device keeps up where no host looks: in static steps, captured or not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import attrs

from ....contract import Needs, Place, Proposer
from ..checks import Broken, Group, NotApplicable

if TYPE_CHECKING:
    from ..asks import Ask
    from ..driving import Rig
    from ..subject import Subject

GROUP = Group("graphs", order=110)

#: Requests at a time: together they fill buckets of rows, and leave rows of others empty.
_WAVES = (1, 3, 2, 5)


@attrs.frozen
class _Told:
    """What of an output depends on the drafts: which of its tokens came as such."""

    token_ids: tuple[int, ...]
    sources: tuple[str, ...]


def _on_device(needs: Needs) -> str:
    return "" if needs.place is Place.DEVICE else "Needs.place is HOST"


def _captured(needs: Needs) -> str:
    return "" if needs.graphs else "Needs.graphs is False"


@GROUP.check("static-steps", "computing it twice writes the same entry once more", applies=_on_device)
def static_steps(subject: Subject) -> str | None:
    """The drafts are those of the plain order."""
    with _engine(subject, async_scheduling=False) as rig:
        plain = _waves(rig, subject)
    with _engine(subject, async_scheduling=True) as rig:
        static = _waves(rig, subject)
        idle = not _ran_static(rig)
    _compare(static, "static steps", plain, "steps in the plain order")
    return "no step was a static one, so nothing was seen" if idle else None


@GROUP.check(
    "fixed-addresses",
    "What must outlast a step is a tensor made in `load` or `bind` and changed in place.",
    applies=_captured,
)
def fixed_addresses(subject: Subject) -> str | None:
    """No tensor that the proposer holds is replaced by another while static steps run."""
    watching: list[_Addresses] = []

    def wrap(proposer: Proposer) -> Proposer:
        from ..watching import AroundStaticSteps

        watching.append(_Addresses(proposer))
        return AroundStaticSteps(proposer, watching[-1].look)

    with _engine(subject, wrap=wrap, async_scheduling=True) as rig:
        _waves(rig, subject)
    (addresses,) = watching
    if addresses.moved:
        moved = dict.fromkeys(addresses.moved)
        raise Broken(
            f"in {addresses.looks} steps it puts others in the place of tensors it holds: {', '.join(moved)}"
        )
    return None if addresses.looks else "no step was a static one, so nothing was seen"


@GROUP.check("copies-nothing", "nothing is copied from the host", applies=_captured)
def copies_nothing(subject: Subject) -> str | None:
    """Nor read there; seen on a CPU too, in the proposer's own code."""
    from ..syncs import SyncWatch
    from ..watching import AroundStaticSteps

    found: list[str] = []

    def wrap(proposer: Proposer) -> Proposer:
        return AroundStaticSteps(proposer, lambda: SyncWatch(found.append, copies=True))

    with _engine(subject, wrap=wrap, async_scheduling=True) as rig:
        _waves(rig, subject)
        idle = not _ran_static(rig)
    if found:
        raise Broken(f"{len(found)} times in static steps: {', '.join(dict.fromkeys(found))}")
    return "no step was a static one, so nothing was seen" if idle else None


@GROUP.check("never-waits", "Nothing is read from a tensor", applies=_captured)
def never_waits(subject: Subject) -> str | None:
    """Under torch's own watch over a GPU, which sees what ``drafts.place-honoured`` cannot: copies."""
    _refuse_cpu(subject)
    import torch

    raised: list[str] = []

    @contextmanager
    def watch() -> Iterator[None]:
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        except RuntimeError as error:
            raised.append(str(error).splitlines()[0])
            raise
        finally:
            torch.cuda.set_sync_debug_mode(before)

    def wrap(proposer: Proposer) -> Proposer:
        from ..watching import AroundStaticSteps

        return AroundStaticSteps(proposer, watch)

    with _engine(subject, wrap=wrap, async_scheduling=True) as rig:
        if rig.engine.core.runner.check_writes:
            raise NotApplicable("core checks every write, and waits to do so")
        _waves(rig, subject)
        idle = not _ran_static(rig)
    if raised:
        raise Broken(f"waits for the device in {len(raised)} static steps: {raised[0]}")
    return "no step was a static one, so nothing was seen" if idle else None


@GROUP.check("replays", "What `propose` does in Python happens at the capture alone", applies=_captured)
def replays(subject: Subject) -> str | None:
    """In every bucket, with empty rows and without, the drafts are those of the same steps uncaptured."""
    _refuse_cpu(subject)
    with _engine(subject, async_scheduling=True) as rig:
        eager = _waves(rig, subject)
    with _engine(subject, async_scheduling=True, enforce_eager=False) as rig:
        core: Any = rig.engine.core
        if not core.steady.captured:
            raise NotApplicable(
                "nothing was captured: core checks every write, or the target is no native model"
            )
        replayed = _waves(rig, subject)
        idle = not _ran_static(rig)
    _compare(replayed, "replayed graphs", eager, "the same steps uncaptured")
    return "no step was a static one, so nothing was seen" if idle else None


# -- engines ---------------------------------------------------------------------------------------
def _engine(subject: Subject, wrap: Any = None, **engine: Any) -> Rig:
    from ....verify import RULES
    from ..driving import Rig

    if RULES[subject.rule].weigh is not None:
        raise NotApplicable(f"under the rule {subject.rule!r} all steps are taken in the plain order")
    return Rig.bare(subject.toy, subject.mapping, subject.manager, wrap, **engine)


def _waves(rig: Rig, subject: Subject) -> dict[str, _Told]:
    """The kit's requests that may sit down, a few at a time; by key."""
    asks = [ask for ask in subject.toy.asks if ask.params.repetition_penalty == 1]
    told: dict[str, _Told] = {}
    for wave, count in enumerate(_WAVES):
        start = sum(_WAVES[:wave])
        told |= _run(rig, [asks[(start + i) % len(asks)].named(f"wave-{wave}-{i}") for i in range(count)])
    return told


def _run(rig: Rig, asks: Sequence[Ask]) -> dict[str, _Told]:
    outputs = rig.outputs(asks)
    return {
        key: _Told(tuple(output.token_ids), tuple(output.token_sources)) for key, output in outputs.items()
    }


def _ran_static(rig: Rig) -> bool:
    """Whether there were more steps than those for which the device waited for the host."""
    metrics = list(rig.engine.get_metrics())
    steps = sum(metric.value for metric in metrics if metric.name == "specdecode:steps")
    waits = sum(metric.value for metric in metrics if metric.name == "specdecode:host_waits")
    return bool(steps > waits)


def _compare(one: dict[str, _Told], what: str, other: dict[str, _Told], beside: str) -> None:
    differ = [key for key in other if one[key] != other[key]]
    if differ:
        mine, theirs = one[differ[0]], other[differ[0]]
        raise Broken(
            f"{len(differ)} of {len(other)} requests; {differ[0]} has {mine.sources.count('draft')} accepted "
            f"drafts among {len(mine.token_ids)} tokens in {what}, {theirs.sources.count('draft')} among "
            f"{len(theirs.token_ids)} in {beside}"
        )


def _refuse_cpu(subject: Subject) -> None:
    if not subject.toy.device.startswith("cuda"):
        raise NotApplicable(f"graphs are captured on a CUDA device, and this is {subject.toy.device!r}")


# -- what a proposer holds -------------------------------------------------------------------------
class _Addresses:
    """The tensors that a proposer holds, looked at after each static step."""

    def __init__(self, proposer: Proposer) -> None:
        self.looks = 0
        self.moved: list[str] = []
        self._proposer = proposer
        self._held: dict[int, str] = {}

    @contextmanager
    def look(self) -> Iterator[None]:
        yield
        self.looks += 1
        held = self._now()
        self.moved += [text for address, text in self._held.items() if address not in held]
        self._held = held

    def _now(self) -> dict[int, str]:
        import torch

        from ..footprint import reachable

        tensors = [found for found in reachable(self._proposer) if isinstance(found, torch.Tensor)]
        return {
            tensor.data_ptr(): f"{tensor.dtype} of shape {list(tensor.shape)}"
            for tensor in tensors
            if tensor.numel()
        }
