"""How heads choose tokens, and when they may stop."""

from __future__ import annotations

import pytest
import torch
from specdecode.heads.drawing import draw
from specdecode.heads.stopping import all_drafted


class Step:
    """A view that says what it was asked to draw."""

    def __init__(self):
        self.asked = None

    def sample(self, logits, rows, positions, k, *, vocabulary=None):
        self.asked = (logits, rows, positions, k, vocabulary)
        return "ids", "scores"


LOGITS = torch.tensor([[0.0, 3.0, 1.0, 2.0], [5.0, 0.0, 5.0, -torch.inf]])
AT = torch.tensor([7, 9])


def test_the_targets_noise_is_the_steps_to_give():
    step, words = Step(), torch.tensor([4, 5, 6, 9])
    assert draw(step, LOGITS, AT, AT + 1, 2, greedy=False, vocabulary=words) == ("ids", "scores")
    logits, rows, positions, count, vocabulary = step.asked
    assert logits is LOGITS and rows is AT and torch.equal(positions, AT + 1)
    assert count == 2 and vocabulary is words


@pytest.mark.parametrize("words", [None, [4, 5, 6, 9]])
def test_greedy_draws_are_the_best_tokens_whatever_the_request(words):
    step = Step()
    vocabulary = None if words is None else torch.tensor(words)
    ids, scores = draw(step, LOGITS, torch.arange(2), AT, 3, greedy=True, vocabulary=vocabulary)
    assert step.asked is None
    best = [[1, 3, 2], [0, 2, 1]]
    assert ids.tolist() == (best if words is None else [[words[i] for i in row] for row in best])
    want = LOGITS.log_softmax(-1).gather(1, torch.tensor(best))
    torch.testing.assert_close(scores, want)


def test_a_cpu_is_asked_whether_all_is_drafted_and_no_other_device():
    lens = torch.tensor([2, 0, 3])
    assert not all_drafted(lens, 2) and all_drafted(lens, 3) and all_drafted(lens[1:2], 0)
    assert not all_drafted(torch.zeros(3, dtype=torch.int64, device="meta"), 3)
