"""What a failure of the proposer costs, and what it does to the proposer itself."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import attrs

from ....contract import Commit, Proposer, RequestInfo
from ..checks import Broken, Group
from ..subject import FIRST_FAILURE, Scene
from .lifecycle import raised_by_itself

if TYPE_CHECKING:
    from ..subject import Subject

GROUP = Group("failure", order=100)

_HOOKS = ("on_add", "on_commit", "on_preempt", "on_finish")
#: Requests that are told of while the proposer is not asked.
_MANY = 10_000


@GROUP.check("costs-drafts-only", "No request's output changes.")
def costs_drafts_only(subject: Subject) -> str | None:
    """The kit raises in ``propose``, then in every hook."""
    from ..probe import Interference

    wanted = _fixed(subject, subject.ordinary)
    hooks = subject.run(subject.toy.asks, Interference(hooks=_HOOKS), num_gpu_blocks_override=40)
    for what, scene in (("propose", subject.failing), ("hooks", hooks)):
        for key, output in _fixed(subject, scene).items():
            if output != wanted[key]:
                raise Broken(f"failures of {what} change {key}: {output}, without them {wanted[key]}")
    return None


def _fixed(subject: Subject, scene: Scene) -> dict[str, list[int]]:
    """The outputs that do not depend on what is drafted."""
    return {ask.key: scene.outputs[ask.key] for ask in scene.asks if subject.fixed(ask.params)}


@GROUP.check("recovers", "``propose`` raising costs the drafts of that step")
def recovers(subject: Subject) -> str | None:
    """A step that was not drafted for must not make the proposer raise later."""
    if raised_by_itself(subject.ordinary.log):
        return "it raises in ordinary runs as well"  # which lifecycle.any-order is about
    raised = raised_by_itself(subject.failing.log)
    if raised:
        raise Broken(f"after a step that failed: {raised[0]}")
    if _fixed(subject, subject.failing) != _fixed(subject, subject.ordinary):
        return "other tokens came out"  # which failure.costs-drafts-only is about
    before, after = (
        any(row.call > FIRST_FAILURE for row in scene.log.drafted)
        for scene in (subject.ordinary, subject.failing)
    )
    if before and not after:
        raise Broken("it drafts nothing more after a step that failed")
    return None


@GROUP.check("frees-unasked", "Hooks about requests are delivered to the end, so that state can be freed.")
def frees_unasked(subject: Subject) -> str | None:
    """Many requests come and go while ``propose`` is not called, as in quarantine."""
    from ..footprint import size_bytes

    proposer = subject.built()
    _come_and_go(subject, proposer, "first", _MANY // 10)
    before = size_bytes(proposer)
    _come_and_go(subject, proposer, "second", _MANY)
    grown = size_bytes(proposer) - before
    if grown > _MANY:  # a byte a request: tables that grew once
        raise Broken(f"it holds {grown} bytes more after {_MANY} requests that were never drafted for")
    return None


def _come_and_go(subject: Subject, proposer: Proposer, name: str, count: int) -> None:
    """Lives without a ``propose``; what a hook raises is for ``lifecycle.any-order``."""
    asks = subject.toy.asks

    def tell(hook: str, *arguments: Any) -> None:
        with suppress(Exception):
            getattr(proposer, hook)(*arguments)

    for number in range(count):
        ask, request_id = asks[number % len(asks)], f"{name}-{number}/0#{number}"
        info = RequestInfo(
            id=request_id,
            namespace="",
            token_ids=ask.prompt,
            prompt_len=len(ask.prompt),
            params=ask.params,
            resumed=False,
        )
        commits = [Commit(id=request_id, token_ids=(3, 4), accepted=1, prefill=False)]
        tell("on_add", info)
        tell("on_commit", commits)
        tell("on_preempt", request_id)
        tell("on_add", attrs.evolve(info, token_ids=(*ask.prompt, 3, 4), resumed=True))
        tell("on_commit", commits)
        tell("on_finish", request_id, "stop" if number % 2 else "length")
