"""Requests that come, stop, are preempted, resumed and aborted in any order."""

from __future__ import annotations

import difflib
import itertools
import math
import numbers
from typing import TYPE_CHECKING, Any

from ....contract import Memory, Proposer, Undeclared
from ..checks import Broken, Group, NotApplicable

if TYPE_CHECKING:
    from ..driving import Rig
    from ..probe import Log
    from ..subject import Subject

GROUP = Group("lifecycle", order=60)

#: Waves of requests after which a proposer's size is looked at, the first one apart, and bytes it may
#: grow by in each.
_WAVES = 4
_SLACK_BYTES = 64


def raised_by_itself(log: Log) -> list[str]:
    """What the proposer raised, but for undeclared reads, which ``honesty`` is about."""
    return [
        f"{method} raised {type(error).__name__}: {error}"
        for method, error in log.raised
        if not isinstance(error, Undeclared)
    ]


@GROUP.check("any-order", "A request was admitted, or admitted again after a preemption.")
def any_order(subject: Subject) -> str | None:
    """A state machine adds, steps, aborts, preempts and reorders at random: nothing is raised."""
    for scene in (subject.ordinary, subject.stress):
        if raised := raised_by_itself(scene.log):
            raise Broken(f"{len(raised)} times in a run without aborts; the first: {raised[0]}")
    try:
        from ..machine import run_machine
    except ModuleNotFoundError as missing:
        raise NotApplicable(f"{missing}; pip install 'specdec-core[testing]'") from None
    run_machine(subject)
    return None


@GROUP.check("known-hooks", "Only :meth:`propose` is abstract; the rest has a default.")
def known_hooks(subject: Subject) -> str | None:
    """A misspelt hook is one that is never called."""
    hooks = [name for name in dir(Proposer) if name.startswith("on_")]
    unknown = [name for name in dir(subject.built()) if name.startswith("on_") and name not in hooks]
    if not unknown:
        return None
    near = {name: difflib.get_close_matches(name, hooks, n=1, cutoff=0.75) for name in unknown}
    told = (f"{name} (did you mean {like[0]}?)" if like else name for name, like in near.items())
    return f"core never calls {', '.join(told)}; its hooks are {', '.join(hooks)}"


@GROUP.check("frees-everything", "The request ended: free all its state.")
def frees_everything(subject: Subject) -> str | None:
    """Waves of requests that end in every way leave neither their ids nor their weight."""
    from ..footprint import size_bytes, strings

    sizes = []
    with subject.rig(num_gpu_blocks_override=40, max_num_batched_tokens=48) as rig:
        assert rig.probe is not None
        for wave in range(_WAVES):
            _live_and_die(rig, subject, wave)
            kept = sorted(name for name in strings(rig.probe.inner) if name in rig.log.prompt_lens)
            if kept:
                raise Broken(f"all requests have ended, and it still holds the ids {', '.join(kept[:5])}")
            rig.forget()
            sizes.append(size_bytes(rig.probe.inner))
    grown = [after - before for before, after in itertools.pairwise(sizes[1:])]
    if subject.needs.memory is Memory.REQUEST and all(bytes_ > _SLACK_BYTES for bytes_ in grown):
        raise Broken(f"it grows by {grown} bytes with each wave of {len(subject.toy.asks)} requests")
    return None


def _live_and_die(rig: Rig, subject: Subject, wave: int) -> None:
    """Some finish, some are aborted waiting, running, preempted, or before their first token."""
    asks = [ask.named(f"wave-{wave}-{ask.key}") for ask in subject.toy.asks]
    for ask in asks[:6]:
        rig.add(ask)
    rig.abort(asks[5].key)  # never admitted
    rig.step()
    rig.abort(asks[0].key)
    for _ in range(3):
        rig.step()
    rig.preempt(0)
    rig.abort(*(ask.key for ask in asks[1:3]))
    for ask in asks[6:]:
        rig.add(ask)
    rig.step()
    rig.preempt(1)
    rig.drain()


@GROUP.check("close-twice", "Free everything. May be called twice.")
def close_twice(subject: Subject) -> str | None:
    proposer = subject.built()  # its engine closed it once
    try:
        proposer.close()
    except Exception as error:
        raise Broken(f"closing it again raised {type(error).__name__}: {error}") from error
    return None


@GROUP.check("metrics", "Host floats; core prefixes the method's name.")
def metrics(subject: Subject) -> str | None:
    with subject.rig() as rig:
        assert rig.probe is not None
        rig.generate(subject.toy.asks[:2])
        try:
            told: Any = rig.probe.inner.metrics()
        except Exception as error:
            raise Broken(f"metrics raised {type(error).__name__}: {error}") from error
        bad = {
            name: value
            for name, value in dict(told).items()
            if not (isinstance(name, str) and isinstance(value, numbers.Real) and math.isfinite(value))
        }
    if bad:
        raise Broken(f"these are no finite floats of the host: {bad!r}")
    return None
