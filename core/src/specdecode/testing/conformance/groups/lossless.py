"""Whether the output is what it is without speculation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....contract import ConfigError, Unsupported
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


@GROUP.check("law", "the same law")
def law(subject: Subject) -> str | None:
    """Behind each token and at each offset of a draft, for a target whose law is known.

    The method's keys must be a function of the kit's ``Toy``, since this is another target.
    """
    from ....api.params import SamplingParams
    from ....verify import RULES
    from ... import offset_laws
    from ..asks import Ask
    from ..driving import Rig
    from ..toy import law_toy

    if RULES[subject.rule].weigh is None:
        raise NotApplicable(f"under the rule {subject.rule!r} tokens are compared, not weighed")
    toy = law_toy(subject.toy.device)
    mapping = subject.mapping_for(toy)
    if mapping is None:
        raise NotApplicable("the case is of one target: give config as a function of the kit's toy")
    temperature = 0.8
    asks = [
        Ask(
            key=f"law-{index}",
            prompt=tuple(ids),
            params=SamplingParams(temperature=temperature, seed=1000 + index, max_tokens=70, ignore_eos=True),
        )
        for index, ids in enumerate(offset_laws.prompts())
    ]
    try:
        rig = Rig.bare(toy, mapping, subject.manager, None, **offset_laws.ENGINE)
    except (ConfigError, Unsupported) as refusal:
        raise NotApplicable(f"its keys do not fit the target whose law is known: {refusal}") from refusal
    with rig:
        outputs = rig.outputs(asks)
    answers = [(ask.prompt[-1], outputs[ask.key]) for ask in asks]
    try:
        offsets = offset_laws.assert_law_of_every_offset(answers, offset_laws.law(temperature))
    except AssertionError as wrong:
        raise Broken(str(wrong)) from wrong
    return None if offsets - {0} else "no draft was accepted, so nothing of its law was seen"


@GROUP.check("new-weights", "The target has new weights: refresh what was made from the old ones, in place.")
def new_weights(subject: Subject) -> str | None:
    """The target's weights are replaced while requests run: what comes then is what the new ones say."""
    asks = [ask.named(f"{ask.key}-after") for ask in subject.toy.asks if subject.fixed(ask.params)]
    wanted = subject.toy.outputs_changed(asks)
    with subject.rig() as rig:
        for ask in subject.toy.asks[:4]:
            rig.add(ask)
        for _ in range(3):
            rig.step()
        rig.update_weights(subject.toy.changed_weights)
        rig.drain()
        outputs = rig.generate(asks)
        if raised := [error for method, error in rig.log.raised if method == "on_target_updated"]:
            raise Broken(f"on_target_updated raised {type(raised[0]).__name__}: {raised[0]}")
    for ask in asks:
        if outputs[ask.key] != wanted[ask.key]:
            raise Broken(f"{ask.key}: {outputs[ask.key]}, of the new weights {wanted[ask.key]}")
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
