"""logits_processors: how they are called, what they may return, and whom their faults concern."""

from __future__ import annotations

import functools

import pytest
import torch
from specdecode import SamplingParams, TokensPrompt
from specdecode.contract import ConfigError
from specdecode.sampling import LogitsProcessors, ProcessorFault
from specdecode.sampling.processors import takes_prompt

PROMPT = TokensPrompt(prompt_token_ids=[101, 102, 103, 104] * 3)
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
SEEDED = GREEDY.clone(temperature=0.9, seed=5)
SPECULATION = ["ngram", "scripted-self-draft", "scripted-eagle"]


def one(llm, params, prompt=PROMPT, **keywords):
    return llm.generate(prompt, params, use_tqdm=False, **keywords)[0].outputs[0]


# -- how they are called --------------------------------------------------------------------------
class Method:
    def two(self, output_ids, logits):
        return logits

    def __call__(self, prompt_ids, output_ids, logits):
        return logits


@pytest.mark.parametrize(
    ("processor", "with_prompt"),
    [
        (lambda ids, logits: logits, False),
        (lambda prompt, ids, logits: logits, True),
        (lambda ids, logits, scale=2.0: logits, False),
        (lambda ids, logits, *, scale=2.0: logits, False),
        (lambda ids, logits, **rest: logits, False),
        (lambda *args: args[-1], False),
        (Method().two, False),
        (Method(), True),
        (functools.partial(lambda a, p, o, x: x, 1), True),
        (torch.add, False),
    ],
)
def test_the_number_of_parameters_says_what_is_passed(processor, with_prompt):
    assert takes_prompt(processor) is with_prompt
    SamplingParams(logits_processors=[processor])


@pytest.mark.parametrize(
    "value", [[3], [lambda logits: logits], [lambda a, b, c, d: d], "ab", print, {print: 1}]
)
def test_what_cannot_be_called_is_refused(value):
    with pytest.raises(ConfigError, match="logits_processors"):
        SamplingParams(logits_processors=value)


def test_one_after_the_other_on_copies():
    first_saw, kept = [], torch.zeros(4)

    def first(output_ids, logits):
        first_saw.append(logits)
        output_ids.append(9)
        return logits + 1

    def second(prompt_ids, output_ids, logits):
        assert (prompt_ids, output_ids) == ([7, 8], [3]) and logits.tolist() == [1] * 4
        logits *= 5
        return logits

    assert LogitsProcessors([first, second], (7, 8))([3], kept).tolist() == [5] * 4
    assert kept.tolist() == first_saw[0].tolist() == [0] * 4


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "must return logits of shape [4], got NoneType"),
        ([0.0] * 4, "got list"),
        (torch.zeros(3), "got shape [3]"),
        (torch.zeros(1, 4), "got shape [1, 4]"),
        (torch.full((4,), torch.nan), "returned NaN"),
        (torch.tensor([0, 1, torch.nan, 2]), "returned NaN"),
    ],
)
def test_what_is_no_logits(returned, message):
    with pytest.raises(ProcessorFault) as caught:
        LogitsProcessors([lambda ids, logits: returned], ())([], torch.zeros(4))
    assert message in str(caught.value) and "lambda" in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64])
def test_other_dtypes_are_logits_too(dtype):
    given = torch.zeros(4)
    got = LogitsProcessors([lambda ids, logits: (logits + 2).to(dtype)], ())([], given)
    assert got.dtype == torch.float32 and got.tolist() == [2] * 4


# -- through the engine ---------------------------------------------------------------------------
class Witness:
    """Writes down what it is shown; draws 120 as each fourth token."""

    def __init__(self) -> None:
        self.calls = []

    def __call__(self, prompt_ids, output_ids, logits):
        assert logits.dtype == torch.float32 and logits.shape == (300,)
        self.calls.append((tuple(prompt_ids), tuple(output_ids), logits.clone()))
        if len(output_ids) % 4 == 3:
            logits[120] += 50
        return logits


@pytest.mark.parametrize("engine", ["whole", "chunked", "preempted"])
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("method", SPECULATION)
def test_each_is_called_once_for_each_token_in_order(start, method, params, engine):
    """Rejected drafts are never shown: the calls are those of decoding without speculation."""
    plain, fast = start(), start(method, engine)
    seen = {}
    for llm in (plain, fast):
        witness = Witness()
        others = [params.clone(seed=None if params.greedy else 10 + i, max_tokens=30) for i in range(6)]
        outputs = llm.generate(
            [PROMPT] * 7, [params.clone(logits_processors=[witness]), *others], use_tqdm=False
        )
        seen[llm] = (witness.calls, [list(o.outputs[0].token_ids) for o in outputs])
    (want, ids), (got, fast_ids) = seen.values()
    assert fast_ids == ids and 120 in ids[0]
    assert [call[:2] for call in want] == [
        (tuple(PROMPT["prompt_token_ids"]), tuple(ids[0][:n])) for n in range(16)
    ]
    assert [call[:2] for call in got] == [call[:2] for call in want]
    for (*_, ours), (*_, theirs) in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    if engine == "preempted":
        assert {m.name: m.value for m in fast.get_metrics()}["vllm:num_preemptions"] > 0


def test_they_come_after_masks_and_before_penalties(start):
    seen = []

    def look(output_ids, logits):
        seen.append(logits.clone())
        return torch.where(logits > -torch.inf, logits * 0 + 10, logits)  # all that are left are equal

    params = GREEDY.clone(
        allowed_token_ids=[50, 51, 52, 53],
        bad_words=["/"],  # 50
        logit_bias={53: -100.0},
        frequency_penalty=1.0,
        logits_processors=[look],
        max_tokens=3,
    )
    assert list(one(start(), params).token_ids) == [51, 52, 53]  # each penalised for having been used
    for logits in seen:
        assert torch.nonzero(logits > -torch.inf)[:, 0].tolist() == [51, 52, 53]
        assert logits[53] < -50 < logits[51]


def test_infinity_forces_a_token(start):
    def force(output_ids, logits):
        logits[60 + len(output_ids)] = torch.inf
        return logits

    for params in (GREEDY, SEEDED.clone(top_p=0.9, top_k=5, min_p=0.1)):
        output = one(start("ngram"), params.clone(logits_processors=[force], logprobs=1))
        assert list(output.token_ids) == list(range(60, 76)) and output.cumulative_logprob < 0


class Counter:
    """Has a state of its own: draws 70, 71, 72, ..."""

    def __init__(self) -> None:
        self.next = 70

    def clone(self):
        return Counter()

    def __call__(self, output_ids, logits):
        logits[self.next] += 1000
        self.next += 1
        return logits


def test_a_state_is_cloned_for_each_completion(start):
    counter = Counter()
    params = SEEDED.clone(n=3, logits_processors=[counter])
    for completion in start("ngram").generate(PROMPT, params, use_tqdm=False)[0].outputs:
        assert list(completion.token_ids) == list(range(70, 86))
    assert counter.next == 70


def test_generates_own_come_first(start):
    def five(output_ids, logits):
        return logits * 0 + 5

    def double(output_ids, logits):
        assert logits.tolist() == [5] * 300
        logits[99] *= 2
        return logits

    llm = start()
    own = GREEDY.clone(logits_processors=[double], max_tokens=2)
    outputs = llm.generate([PROMPT, PROMPT], [own, own], None, False, None, None, five)  # by position
    assert [list(output.outputs[0].token_ids) for output in outputs] == [[99, 99]] * 2
    assert own.logits_processors == (double,)
    both = llm.generate(PROMPT, GREEDY.clone(max_tokens=2), use_tqdm=False, logits_processor=[five, double])
    assert list(both[0].outputs[0].token_ids) == [99, 99]
    with pytest.raises(ConfigError, match="logits_processors"):
        llm.generate(PROMPT, GREEDY, use_tqdm=False, logits_processor=3)


# -- faults ---------------------------------------------------------------------------------------
def raising(prompt_ids, output_ids, logits):
    if len(output_ids) == 4:
        raise KeyError("nothing there")
    return logits


def misshapen(output_ids, logits):
    return logits if len(output_ids) < 4 else logits[:10]


def nan(output_ids, logits):
    return logits if len(output_ids) < 4 else logits * torch.nan


def nothing_left(output_ids, logits):
    return logits if len(output_ids) < 4 else logits - torch.inf


FAULTS = {
    raising: "logits processor raising raised KeyError: 'nothing there'",
    misshapen: "logits processor misshapen must return logits of shape [300], got shape [10]",
    nan: "logits processor nan returned NaN",
    nothing_left: "no token is left to draw",
}


@pytest.mark.parametrize("engine", ["whole", "chunked", "preempted", "late"])
@pytest.mark.parametrize("method", [None, *SPECULATION])
def test_a_fault_ends_its_own_request(start, method, engine):
    llm = start(method, engine)
    params = [GREEDY, SEEDED, GREEDY.clone(max_tokens=30), SEEDED.clone(seed=9, n=2)]
    fine = [o.outputs[0].token_ids for o in llm.generate([PROMPT] * 4, params, use_tqdm=False)]
    bad = [p.clone(logits_processors=[fault], logprobs=1) for p, fault in zip(params, FAULTS, strict=True)]
    mixed = llm.generate(
        [PROMPT] * 8, [p for pair in zip(params, bad, strict=True) for p in pair], use_tqdm=False
    )
    for want, good, broken, message in zip(fine, mixed[::2], mixed[1::2], FAULTS.values(), strict=True):
        assert good.outputs[0].token_ids == want and good.outputs[0].error is None
        assert list(broken.outputs[0].token_ids) == list(want[:4])
        assert broken.finished
        for completion in broken.outputs:
            assert completion.finish_reason == "error" and message in completion.error
            assert len(completion.token_ids) == len(completion.logprobs) == 4


def test_a_fault_at_the_first_token(start):
    calls = []

    def never(output_ids, logits):
        calls.append(output_ids)
        raise ZeroDivisionError

    for engine in ("whole", "late"):
        calls.clear()
        output = one(start("ngram", engine), GREEDY.clone(logits_processors=[never]))
        assert (output.finish_reason, output.token_ids, output.text) == ("error", [], "")
        assert "ZeroDivisionError" in output.error and calls == [[]]


def test_a_stop_before_the_fault_is_a_stop(start):
    """What a processor would do behind the end of the output never happened."""
    for method in (None, "scripted-self-draft"):
        llm = start(method)
        ids = one(llm, GREEDY).token_ids
        output = one(llm, GREEDY.clone(logits_processors=[raising], stop_token_ids=[ids[3]]))
        assert (output.finish_reason, output.error) == ("stop", None)
        assert list(output.token_ids) == list(ids[: list(ids).index(ids[3]) + 1])
