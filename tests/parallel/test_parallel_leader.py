"""Methods that rank 0 runs alone: whatever they draw on, all ranks have the same drafts."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
import torch
from specdecode.contract import API, LengthFields, Needs, Place, Proposer, ProposerSpec, Tokens, option
from specdecode.plugins import default_manager, hookimpl
from specdecode.testing.lossless import Engine, requests
from specdecode.testing.ranks import ranks_in_threads
from specdecode.testing.tiny import tiny_checkpoint

#: Every proposer that was asked, or measured, by the thread that ran it.
asked = []


@attrs.frozen(kw_only=True)
class DiceConfig(LengthFields):
    device: bool = option("work on the device", default=False)
    fails: int = option("call that fails", default=-1)


class Dice(Proposer):
    """Drafts by a generator that nobody seeded; its number of drafts follows from a time."""

    def __init__(self, config):
        self._config, self._calls = config, 0

    def bind(self, resources):
        asked.append(("bind", resources.costs([(1, 1), (1, 4)]).seconds(1, 1)))
        self.most = 3

    def propose(self, step, out):
        self._calls += 1
        asked.append(("propose", id(self)))
        if self._calls == self._config.fails:
            raise RuntimeError("no dice")
        if self._config.device:
            out.ids.copy_(torch.randint(3, 300, out.ids.shape))
            out.lens.copy_(torch.minimum(step.budget, step.room))
        else:
            out.ids[...] = np.random.default_rng().integers(3, 300, out.ids.shape)
            out.lens[...] = np.minimum(step.budget, step.room)


class DicePlugin:
    @hookimpl
    def specdecode_proposers(self):
        def needs(config, context):
            count = config.num_speculative_tokens
            place = Place.DEVICE if config.device else Place.HOST
            return Needs(width=count, depth=count, tokens=Tokens.NONE, place=place)

        yield ProposerSpec(
            name="dice", summary="dice", api=API, config=DiceConfig, needs=needs, build=lambda c, _: Dice(c)
        )


@pytest.fixture
def dice():
    asked.clear()
    default_manager().register(DicePlugin(), name="dice")
    yield "dice"
    default_manager().unregister("dice")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    torch.set_num_threads(1)
    return tiny_checkpoint(tmp_path_factory.mktemp("leader") / "target", output_scale=0.2)


@pytest.mark.parametrize("order", ["plain", "late"])
@pytest.mark.parametrize("device", [False, True])
def test_random_drafts_are_the_same_on_all_ranks(target, dice, device, order):
    config = {"method": dice, "num_speculative_tokens": 5, "device": device, "fails": 4}
    prompts, params = requests(4)
    with ranks_in_threads() as (started):
        engine = Engine(target, config, order, tensor_parallel_size=2)
    assert engine(prompts, params) == Engine(target)(prompts, params)
    follower = started[0].caught_up(1)
    assert follower.trace() == engine.llm.llm_engine.trace()
    assert len({who for what, who in asked if what == "propose"}) == 1
    assert sum(what == "bind" for what, _ in asked) == 1
    assert engine.metric("vllm:spec_decode_num_draft_tokens") > 0
    cores = (engine.llm.llm_engine.core, follower.core)
    assert [core.drafting.proposer.failures for core in cores] == [1, 1]
    assert [core.drafting.needs.width for core in cores] == [3, 3]  # as rank 0 found
    engine.llm.shutdown()
