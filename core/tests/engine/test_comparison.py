"""The comparison of results sees every difference, and none where two log-probabilities are tied."""

from __future__ import annotations

import attrs
import pytest
from specdecode import RequestOutputKind
from specdecode.api.outputs import CompletionOutput, Logprob, RequestOutput
from specdecode.testing.comparison import differences, joined


def entry(*values):
    """Tokens 10, 11, ... with these log-probabilities, the first one drawn."""
    ranks = [1 + sum(other > value for other in values) for value in values]
    return {10 + i: Logprob(value, ranks[i], f"w{10 + i}") for i, value in enumerate(values)}


COMPLETION = CompletionOutput(
    index=0,
    text=" w10 w10",
    token_ids=[10, 10],
    cumulative_logprob=-1.7,
    logprobs=[entry(-0.7, -1.5, -2.0), entry(-1.0, -1.5, -2.0)],
    finish_reason="stop",
    stop_reason="x",
)
OUTPUT = RequestOutput(
    request_id="a",
    prompt=None,
    prompt_token_ids=[5, 10],
    outputs=[COMPLETION],
    finished=True,
    prompt_logprobs=[None, entry(-0.5, -0.9)],
)


def found(completion=COMPLETION, **changes):
    return list(differences(attrs.evolve(OUTPUT, outputs=[completion], **changes), OUTPUT))


def with_entry(*values, **changes):
    first = {token: attrs.evolve(value, **changes) for token, value in entry(*values).items()}
    return attrs.evolve(COMPLETION, logprobs=[first, COMPLETION.logprobs[1]])


def test_a_result_is_its_own_equal():
    assert not found()
    assert not list(differences(attrs.evolve(OUTPUT, request_id="b", num_cached_tokens=4), OUTPUT))
    assert not found(with_entry(-0.70005, -1.49995, -2.0))


@pytest.mark.parametrize(
    "changes",
    [
        {"text": " w10"},
        {"token_ids": [10, 11]},
        {"token_ids": [10]},
        {"index": 1},
        {"finish_reason": "length"},
        {"stop_reason": None},
        {"stop_reason": "y"},
        {"error": "no"},
        {"cumulative_logprob": -1.71},
        {"cumulative_logprob": None},
        {"logprobs": None},
        {"logprobs": COMPLETION.logprobs[:1]},
        {"logprobs": [COMPLETION.logprobs[0], entry(-1.0, -1.5)]},
    ],
    ids=str,
)
def test_a_completion_that_differs(changes):
    assert len(found(attrs.evolve(COMPLETION, **changes))) == 1


def test_types_of_stop_reasons():
    by_id = attrs.evolve(OUTPUT, outputs=[attrs.evolve(COMPLETION, stop_reason=1)])
    by_bool = attrs.evolve(OUTPUT, outputs=[attrs.evolve(COMPLETION, stop_reason=True)])
    assert list(differences(by_bool, by_id))


def test_entries_that_differ():
    assert found(with_entry(-0.7002, -1.5, -2.0))  # a value
    assert found(with_entry(-0.7, -1.5, -2.0, rank=2))
    assert found(with_entry(-0.7, -1.5, -2.0, decoded_token="?"))
    reordered = dict(reversed(entry(-0.7, -1.5, -2.0).items()))
    assert found(attrs.evolve(COMPLETION, logprobs=[reordered, COMPLETION.logprobs[1]]))  # the drawn token
    other = entry(-0.7, -1.5) | {77: Logprob(-1.7, 3, "w77")}
    assert found(attrs.evolve(COMPLETION, logprobs=[other, COMPLETION.logprobs[1]]))  # a likelier one


def test_ties_may_stand_in_either_order():
    want = attrs.evolve(OUTPUT, outputs=[with_entry(-0.7, -1.5, -1.50003)])
    swapped = {10: Logprob(-0.7, 1, "w10"), 12: Logprob(-1.5, 2, "w12"), 11: Logprob(-1.50003, 3, "w11")}
    got = attrs.evolve(COMPLETION, logprobs=[swapped, COMPLETION.logprobs[1]])
    assert not list(differences(attrs.evolve(OUTPUT, outputs=[got]), want))
    last = entry(-0.7, -1.5) | {77: Logprob(-2.00003, 3, "w77")}  # tied with one that was cut off
    assert not found(attrs.evolve(COMPLETION, logprobs=[last, COMPLETION.logprobs[1]]))


def test_prompts_and_numbers_of_outputs():
    assert found(prompt_token_ids=[5])
    assert found(prompt_logprobs=None)
    assert found(prompt_logprobs=[None])
    assert found(prompt_logprobs=[entry(-0.5, -0.9)] * 2)
    assert found(prompt_logprobs=[None, entry(-0.6, -0.9)])
    assert list(differences(attrs.evolve(OUTPUT, outputs=[]), OUTPUT))


def test_an_error_is_compared_by_its_core():
    want = attrs.evolve(OUTPUT, outputs=[attrs.evolve(COMPLETION, error="five is enough")])
    got = attrs.evolve(COMPLETION, error="logits processor f raised RuntimeError: five is enough")
    assert not list(differences(attrs.evolve(OUTPUT, outputs=[got]), want))
    assert list(differences(OUTPUT, want))


# -- streams ---------------------------------------------------------------------------------------
def pieces(*parts, **changes):
    """Outputs of a stream: the text and ids of each."""
    outputs = [
        attrs.evolve(COMPLETION, text=text, token_ids=ids, logprobs=[COMPLETION.logprobs[0]] * len(ids))
        for text, ids in parts
    ]
    return [
        attrs.evolve(OUTPUT, outputs=[output], finished=place == len(parts) - 1, **changes)
        for place, output in enumerate(outputs)
    ]


def test_deltas_are_joined():
    stream = pieces((" w10", [10]), ("", []), (" w11", [11]))
    stream[1:] = [attrs.evolve(output, prompt_logprobs=None) for output in stream[1:]]
    whole = joined(stream, RequestOutputKind.DELTA)
    assert (whole.outputs[0].text, list(whole.outputs[0].token_ids)) == (" w10 w11", [10, 11])
    assert len(whole.outputs[0].logprobs) == 2
    assert whole.prompt_logprobs == OUTPUT.prompt_logprobs


def test_the_last_of_growing_outputs():
    stream = pieces((" w10", [10]), (" w10 w11", [10, 11]))
    assert joined(stream, RequestOutputKind.CUMULATIVE) is stream[-1]


@pytest.mark.parametrize(
    ("stream", "kind"),
    [
        (pieces((" w10", [10]), (" w1", [10, 11])), RequestOutputKind.CUMULATIVE),
        (pieces((" w10", [10]), (" w10 w11", [12, 11])), RequestOutputKind.CUMULATIVE),
        (pieces((" w10", [10]), ("", [])), RequestOutputKind.FINAL_ONLY),
        (pieces((" w10", [10]), (" w11", [11])), RequestOutputKind.DELTA),  # prompt_logprobs told twice
        (pieces((" w10", [10]), ("", [])) * 2, RequestOutputKind.DELTA),  # goes on behind the end
        (pieces((" w10", [10]), ("", []))[:1], RequestOutputKind.DELTA),  # never ends
    ],
)
def test_a_stream_that_takes_back_or_repeats_or_never_ends(stream, kind):
    with pytest.raises(AssertionError):
        joined(stream, kind)
