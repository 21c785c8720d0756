"""H25: scaled rotary positions are the drafter's too; what it is handed are positions in the whole text."""

from __future__ import annotations

import shutil

import pytest

ROPES = {
    "linear": (64, {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}),
    "llama3": (
        256,
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "rope_theta": 10000.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
}
MOST = 256


@pytest.fixture(scope="module", params=ROPES)
def target(request, tmp_path_factory):
    from specdecode.testing.tiny import tiny_checkpoint

    length, rope = ROPES[request.param]
    path = tmp_path_factory.mktemp("h25") / "target"
    return tiny_checkpoint(path, output_scale=0.5, max_position_embeddings=length, rope_parameters=rope)


@pytest.mark.parametrize("late", [False, True], ids=["plain", "late"])
def test_h25_a_copy_is_right_from_the_first_position_to_the_last(faults, same, target, tmp_path, late):
    pytest.importorskip("specdec_draft")
    own = shutil.copytree(target, tmp_path / "own")
    asks = [faults.ask([40], temperature=t, seed=1, max_tokens=400, ignore_eos=True) for t in (0, 1.0)]
    options = {"model": str(target), "max_model_len": MOST}
    config = {"method": "draft_model", "model": str(own), "num_speculative_tokens": 4}
    engine = faults.engine(config, async_scheduling=late, **options)
    outputs = engine.generate(asks)
    same(outputs, faults.engine(**options).generate(asks))
    assert engine.accepted == engine.drafted > 380
    assert all(len(output.outputs[0].token_ids) == MOST - 1 for output in outputs)


@pytest.mark.parametrize("late", [False, True], ids=["plain", "late"])
def test_h25_a_head_is_handed_positions_of_the_whole_text(faults, same, target, tmp_path, monkeypatch, late):
    """In chunks, behind a prefix of the cache and in drafts; its own table reaches as far as the target."""
    testing = pytest.importorskip("specdec_eagle.testing")
    from specdec_eagle.head import EagleHead
    from specdec_eagle.proposer import EagleProposer

    fed, drafted, propose, forward = [], [], EagleProposer.propose, EagleHead.forward

    def note(self, step, out):
        ends = (step.positions[step.last] - step.committed_len).tolist()
        fed.extend(end for end, budget in zip(ends, step.budget.tolist(), strict=True) if budget)
        drafted.clear()
        propose(self, step, out)
        if step.width and int(step.budget.max()) > 0:
            expected = [step.committed_len + level for level in range(len(drafted) - 1)]
            assert all(map(lambda a, b: a.tolist() == b.tolist(), drafted[1:], expected))

    def positions(self, ids, feature, positions, *args, **kwargs):
        drafted.append(positions)
        return forward(self, ids, feature, positions, *args, **kwargs)

    monkeypatch.setattr(EagleProposer, "propose", note)
    monkeypatch.setattr(EagleHead, "forward", positions)
    scaling = {"rope_type": "linear", "factor": 4.0}
    head = testing.write_head(tmp_path / "head", "eagle", target, rope_scaling=scaling)
    options = {"model": str(target), "max_model_len": MOST, "max_num_batched_tokens": 48, "max_num_seqs": 8}
    asks = [faults.ask(range(9, 109), max_tokens=60, ignore_eos=True)] * 2
    asks.append(faults.ask([7], max_tokens=MOST, ignore_eos=True))
    config = {"method": "eagle", "model": str(head), "num_speculative_tokens": 3}
    engine = faults.engine(config, recorded=False, async_scheduling=late, **options)
    base = faults.engine(**options).generate(asks)
    same(engine.generate(asks), base)
    same(engine.generate(asks), base)
    assert engine.drafts > 50 and not engine.metric("specdecode:proposer_failures")
    assert set(fed) == {-1}  # where it drafts, the last token fed is the last there is
