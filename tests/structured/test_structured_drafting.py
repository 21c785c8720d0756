"""What a proposer is told of a grammar: ``step.allowed``, and ``step.sample`` for the next token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from specdecode.contract import (
    API,
    BuildContext,
    Drafts,
    LengthFields,
    Needs,
    Place,
    PlanContext,
    Proposer,
    ProposerSpec,
    StepView,
)
from specdecode.plugins import default_manager, hookimpl

SEEN: list[Any] = []


class Guesser(Proposer):
    """Drafts the only token that is allowed, where there is one; writes down what it was told."""

    def propose(self, step: StepView, out: Drafts) -> None:
        allowed = step.allowed
        SEEN.append(allowed)
        if allowed is None:
            return
        allowed = np.asarray(allowed)
        for row in range(len(allowed)):
            (ids,) = allowed[row].nonzero()
            if len(ids) == 1 and step.budget[row]:
                out.ids[row, 0] = int(ids[0])
                out.lens[row] = 1


class GuesserPlugin:
    @hookimpl
    def specdecode_proposers(self) -> Iterator[ProposerSpec]:
        def build(config: LengthFields, ctx: BuildContext) -> Proposer:
            return Guesser()

        def on(place: Place) -> Any:
            def needs(config: LengthFields, ctx: PlanContext) -> Needs:
                count = config.num_speculative_tokens
                return Needs(width=count, depth=count, place=place)

            return needs

        for place in Place:
            yield ProposerSpec(
                name=f"guesser-{place.value}",
                summary="guesses what the grammar forces",
                api=API,
                config=LengthFields,
                needs=on(place),
                build=build,
            )


@pytest.fixture(scope="module", autouse=True)
def _guesser():
    default_manager().register(GuesserPlugin(), name="structured-guesser")


def engine(structured, config):
    return structured.lab.rig(config, recorded=False, skip_tokenizer_init=False)


@pytest.mark.parametrize("place", ["host", "device"])
def test_a_proposer_is_told_what_is_allowed(structured, place):
    asks = [structured.ask({"choice": ["one thing", "two things"]}), structured.ask(None, max_tokens=9)]
    SEEN.clear()
    with engine(structured, {"method": f"guesser-{place}", "num_speculative_tokens": 1}) as rig:
        for ask, output in zip(asks, structured.run(rig, asks), strict=True):
            assert list(output.outputs[0].token_ids) == list(structured.alone(ask).outputs[0].token_ids)
        drafts = rig.metric("vllm:spec_decode_num_drafts")
        assert drafts > 3 and rig.metric("vllm:spec_decode_num_accepted_tokens") == drafts
        assert all(np.asarray(allowed).shape[1] == 300 for allowed in SEEN if allowed is not None)
        both = next(np.asarray(allowed) for allowed in SEEN if allowed is not None and len(allowed) == 2)
        assert both.dtype == bool and sorted(both.sum(1).tolist())[1] == 300
        SEEN.clear()
        structured.run(rig, asks[1:])
        assert SEEN and all(allowed is None for allowed in SEEN)


@pytest.mark.parametrize("chance", [{}, {"temperature": 1.0, "seed": 4}])
def test_a_copy_of_the_target_is_right_about_the_next_token(structured, kinds, chance):
    """It samples under the grammar's mask for the first draft, so none of these is rejected."""
    asks = [structured.ask(kind.wish, **chance) for kind in kinds.values()]
    with engine(structured, {"method": "scripted-self-draft", "num_speculative_tokens": 3}) as rig:
        structured.run(rig, asks)
        first, *_ = rig.metric("vllm:spec_decode_num_accepted_tokens_per_pos")
        assert first == rig.metric("vllm:spec_decode_num_drafts") > 30
