"""Whether the output is what it is without speculation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..checks import Broken, Group, NotApplicable
from ..subject import INVARIANT

if TYPE_CHECKING:
    from ..subject import Subject

GROUP = Group("lossless", order=90)


@GROUP.check("greedy", "It is lossless whatever a drafter does.")
def greedy(subject: Subject) -> str | None:
    _compare(subject, sampled=False)
    return None


@GROUP.check("seeded", "same seed, same tokens, with and without speculation")
def seeded(subject: Subject) -> str | None:
    if subject.rule != INVARIANT:
        raise NotApplicable(f"under the rule {subject.rule!r} the law is the target's, not each token")
    _compare(subject, sampled=True)
    return None


def _compare(subject: Subject, *, sampled: bool) -> None:
    for scene in (subject.ordinary, subject.stress):
        asks = [ask for ask in scene.asks if (ask.params.temperature > 0) is sampled]
        wanted = subject.toy.outputs(asks)
        for ask in asks:
            output, plain = scene.outputs[ask.key], wanted[ask.key]
            if output != plain:
                raise Broken(
                    f"{ask.key}, temperature {ask.params.temperature}: {output}, without speculation {plain}"
                )
