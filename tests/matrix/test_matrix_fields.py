"""What fields do that no result shows: bounds of the drafts, pieces of a stream, refusals."""

from __future__ import annotations

import pytest

DRAFTERS = ("ngram", "oracle", "oracle-tree", "self-draft", "eagle-grown-tree")


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_speculation_bounds_the_drafts(matrix, drafter):
    cases = [matrix.greedy(speculation=wish) for wish in (None, 2, False)]
    wide, two, off = (outputs[-1] for outputs in matrix.told(drafter, cases))
    assert off.metrics.drafted == 0
    assert 0 < two.metrics.drafted <= 2 * two.metrics.draft_steps
    assert wide.metrics.drafted > 2 * wide.metrics.draft_steps


def test_best_of_is_n():
    from specdecode import SamplingParams
    from specdecode.contract import ConfigError

    with pytest.raises(ConfigError, match="best_of"):
        SamplingParams(n=2, best_of=3)
    assert SamplingParams(n=2, best_of=2).n == 2


@pytest.mark.parametrize("drafter", ["plain", *DRAFTERS])
@pytest.mark.parametrize("changes", [{}, {"logprobs": 2, "prompt_logprobs": 1}, {"n": 2}], ids=str)
def test_the_pieces_of_a_stream(matrix, drafter, changes):
    """DELTA and CUMULATIVE tell of the same steps, FINAL_ONLY of the end; prompt_logprobs come first."""
    from specdecode import RequestOutputKind

    kinds = list(RequestOutputKind)
    cases = [matrix.greedy(output_kind=kind, **changes) for kind in kinds]
    told = dict(zip(kinds, matrix.told(drafter, cases), strict=True))
    delta, growing = told[RequestOutputKind.DELTA], told[RequestOutputKind.CUMULATIVE]
    assert len(told[RequestOutputKind.FINAL_ONLY]) == 1
    assert len(delta) == len(growing) > 1
    for place in range(changes.get("n", 1)):
        sizes = [len(output.outputs[place].token_ids) for output in delta]
        grown = [len(output.outputs[place].token_ids) for output in growing]
        assert [sum(sizes[: step + 1]) for step in range(len(sizes))] == grown
    scored = [output.prompt_logprobs is not None for output in delta]
    assert scored == [bool(changes.get("prompt_logprobs"))] + [False] * (len(delta) - 1)
