"""Steps that are timed before any request came: their tokens differ, since a router reads by the text."""

from __future__ import annotations

import torch
from specdec_kernels import experts
from specdecode.runner.profiling import target_costs
from specdecode.runner.seats import Seats, SeatShape
from specdecode.testing.lossless import Engine
from specdecode.testing.tiny import tiny_checkpoint

CPU = torch.device("cpu")


def a_seat_of(tree):
    shape = SeatShape(rows=3, width=4, depth=4, tree=tree, columns=9, block_size=4, vocab_size=300, history=8)
    return Seats(shape, CPU)


def test_seats_are_filled_and_emptied():
    for tree in (False, True):
        seats, untouched = a_seat_of(tree), a_seat_of(tree)
        for width in (0, 2, 4):
            seats.rehearse(width, 20)
            drafts = seats.drafts.ids[:, :width]
            tokens = torch.cat((seats.last[:, None], drafts), 1).flatten()
            assert len(tokens.unique()) == 3 * (1 + width) and int(tokens.max()) < 300
            assert seats.active.tolist() == [1] * 3 and seats.drafts.lens.tolist() == [width] * 3
            assert bool((seats.table > 0).all()) and int(seats.table.max()) <= 20
        seats.clear()
        for name in ("committed", "limit", "active", "budget", "last", "table"):
            assert torch.equal(getattr(seats, name), getattr(untouched, name)), name
        for name in ("ids", "lens", "parents"):
            assert torch.equal(getattr(seats.drafts, name), getattr(untouched.drafts, name)), name


def test_all_drafts_of_a_rehearsal_are_computed():
    from specdec_kernels import verification
    from specdecode.runner.seats import StepInputs

    seats = a_seat_of(False)
    for width in (1, 4):
        seats.rehearse(width, 20)
        inputs = StepInputs.allocate(seats.shape, 1 + width, CPU)
        verification.next_inputs(
            seats.last, seats.drafts.ids[:, :width], seats.drafts.lens, None, seats.committed, seats.limit,
            seats.active, seats.budget, seats.table, block_size=4, vocab_size=300, depth=4, ids=inputs.ids,
            lens=inputs.lens, parents=inputs.parents, positions=inputs.positions,
            write_slots=inputs.write_slots, base=inputs.base, faults=seats.faults,
        )  # fmt: skip
        assert inputs.lens.tolist() == [width] * 3
        assert torch.equal(inputs.ids[:, 1:], seats.drafts.ids[:, :width])
        assert len(inputs.ids.unique()) == 3 * (1 + width)
        assert len(inputs.write_slots.unique()) == 3 * (1 + width) and not seats.faults.any()


def test_timed_steps_touch_as_many_experts_as_chance_would(tmp_path, monkeypatch):
    """Of a router of random weights; what the curve of costs is measured on."""
    path = tiny_checkpoint(tmp_path, "qwen3-moe", num_experts=32, num_experts_per_tok=2)
    engine = Engine(path, max_num_seqs=8)
    seen = {}
    choose = experts.choose

    def counted(logits, count, **how):
        ids, weights = choose(logits, count, **how)
        seen.setdefault(len(ids), []).append(len(ids.unique()))
        return ids, weights

    monkeypatch.setattr(experts, "choose", counted)
    target_costs(engine.llm.llm_engine.core.runner, [(1, 1), (1, 4), (8, 1), (8, 4)], repeats=1)
    for tokens, counts in seen.items():
        mean, expected = sum(counts) / len(counts), experts.expected_experts(32, 2, tokens)
        assert 0.75 * expected <= mean <= 1.1 * expected, (tokens, mean, expected)
    assert set(seen) == {1, 4, 8, 32}
