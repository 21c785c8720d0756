"""The loop that launches a step before it has read the one before: who sits, who waits and why, and what
happens to what is under way when a request ends, is aborted, finds no block or gives NaN."""

from __future__ import annotations

import functools

import pytest
import torch
from specdecode.contract import Bucket

METHODS = (
    "none",
    "ngram",
    "oracle-tree",
    "self-draft",
    "eagle",
    "eagle-grown-tree",
    "eagle3",
    "medusa",
    "cascade",
)
#: Drafts are made on the host, by lookups or beside heads.
ON_HOST = ("ngram", "oracle-tree", "cascade")


def waits(rig):
    return {reason: counter.total for reason, counter in rig.core.metrics.host_waits.items()}


def in_buckets(core):
    """Have steps run as captured graphs would: in the smallest bucket of rows, drafting part of them."""
    steady = core.steady
    draft = core._draft if core.drafting and not core._on_host else None
    steady._captured = {
        Bucket(rows, tokens): functools.partial(steady._step, rows, tokens, draft)
        for rows in steady._buckets
        for tokens in steady._sizes
    }


@pytest.mark.parametrize("method", METHODS)
def test_seated_rows_wait_for_nobody(lab, method):
    asks = lab.seatable(max_tokens=30)
    with lab.rig(method, asks, "late") as rig:
        for index, ask in enumerate(asks):
            rig.add(str(index), ask)
        finished = {}
        while rig.core.scheduler.waiting or not set(rig.core.scheduler.running) <= set(rig.core._seated):
            finished |= rig.step()
        before = waits(rig)
        finished |= rig.drain()
        for index, ask in enumerate(asks):
            rig.compare(ask, finished[str(index)])
        grown = {reason for reason, count in waits(rig).items() if count > before.get(reason, 0)}
        assert grown <= {"seats"} | ({"host_proposer"} if method in ON_HOST else set())


@pytest.mark.parametrize(
    "method", ["none", "self-draft", "eagle", "eagle-fixed-tree", "eagle3-grown-tree", "cascade"]
)
def test_empty_seats_and_padding_change_nothing(lab, method):
    """Rows end at different steps and leave their seats empty; five rows run in a bucket of eight."""
    asks = lab.seatable(10)[:5]
    with lab.rig(method, asks, "late", recorded=False) as rig:
        in_buckets(rig.core)
        rig.generate(asks)
        rig.generate(asks[:3])


@pytest.mark.parametrize("method", ["self-draft", "eagle", "eagle3-grown-tree", "medusa"])
def test_who_sits_down_gets_its_drafts_from_replayed_steps(lab, method):
    """And who does not, from each of its own."""
    seated = lab.ask(lab.prompt(0), temperature=0, max_tokens=24)
    looked_at = lab.ask(lab.prompt(1), temperature=0, max_tokens=24, repetition_penalty=1.2)
    with lab.rig(method, [seated, looked_at], "late", recorded=False) as rig:
        in_buckets(rig.core)
        rig.core.steady._draft_captured = True
        rig.add("0", seated)
        rig.add("1", looked_at)
        rig.step()
        one, other = sorted(rig.core.scheduler.running, key=lambda request: request.id)
        assert not one.drafts and other.drafts
        rig.drain()
        assert rig.core.metrics.drafts.total > 2
        rig.generate([seated, looked_at])


def test_outputs_come_one_step_late(lab):
    (ask,) = lab.seatable(1)[:1]
    with lab.rig("none", [ask], "late") as rig:
        rig.add("a", ask)
        rig.step()  # the prompt, in the plain order
        core = rig.core
        (request,) = core.scheduler.running
        seen = len(request.token_ids)
        rig.step()
        assert len(core._in_flight) == 1 and len(request.token_ids) == seen
        rig.step()
        assert len(core._in_flight) == 1 and len(request.token_ids) == seen + 1
        rig.drain()


@pytest.mark.parametrize(
    ("reason", "params"),
    [
        ("logprobs", {"logprobs": 2}),
        ("sampling_parameters", {"repetition_penalty": 1.2}),
        ("sampling_parameters", {"logit_bias": {5: 1.0}}),
        ("sampling_parameters", {"allowed_token_ids": list(range(3, 200))}),
        ("sampling_parameters", {"min_tokens": 5}),
        ("logits_processors", {"logits_processors": [lambda ids, logits: logits]}),
    ],
)
def test_what_the_host_must_look_at_is_counted(lab, reason, params):
    asks = [lab.ask(lab.prompt(0), temperature=0, max_tokens=12, **params), *lab.seatable(2)]
    with lab.rig("self-draft", asks, "late", recorded=False) as rig:
        prompts = [{"prompt_token_ids": ask.prompt} for ask in asks]
        outputs = rig.llm.generate(prompts, [ask.params for ask in asks], use_tqdm=False)
        for ask, output in zip(asks[1:], outputs[1:], strict=True):
            rig.compare(ask, output)
        assert waits(rig)[reason] > 0


@pytest.mark.parametrize(
    "method", ["none", "eagle", "self-draft", "oracle-tree", "eagle3-grown-tree", "cascade"]
)
def test_who_cannot_sit_keeps_nobody_from_it(lab, method):
    """One request is looked at by the host in each step, and others come one by one; the rest sit on."""
    asks = [
        lab.ask(lab.prompt(0), temperature=0.9, seed=3, max_tokens=30, repetition_penalty=1.2),
        *lab.seatable(6, max_tokens=24),
    ]
    with lab.rig(method, asks, "late") as rig:
        finished, steady = {}, 0
        for index, ask in enumerate(asks):
            rig.add(str(index), ask)
            finished |= rig.step(3)
            steady += bool(rig.core._in_flight) or method in ON_HOST
        finished |= rig.drain()
        for index, ask in enumerate(asks):
            rig.compare(ask, finished[str(index)])
        assert steady >= 4
        assert waits(rig)["sampling_parameters"] > 0


def test_an_abort_leaves_the_others_untouched(lab):
    asks = lab.seatable(4, max_tokens=30)
    with lab.rig("eagle", asks, "late") as rig:
        for index, ask in enumerate(asks):
            rig.add(str(index), ask)
        rig.step(6)
        assert rig.core._in_flight
        rig.abort("1")
        finished = rig.drain()
        for index, ask in enumerate(asks):
            if index != 1:
                rig.compare(ask, finished[str(index)])


@pytest.mark.parametrize("method", ["none", "self-draft", "oracle-tree", "eagle-grown-tree"])
def test_a_full_pool_goes_back_to_the_plain_order(lab, method):
    asks = lab.seatable(8, max_tokens=24)
    with lab.rig(method, asks, "late", num_gpu_blocks_override=34) as rig:
        rig.generate(asks)
        assert waits(rig)["memory"] > 0


def test_logits_of_which_nothing_can_be_drawn_end_their_request_alone(lab, monkeypatch):
    asks = lab.seatable(4, max_tokens=20)
    with lab.rig("self-draft", asks, "late", recorded=False) as rig:
        core = rig.core
        for index, ask in enumerate(asks):
            rig.add(str(index), ask)
        rig.step(4)
        assert core._seated
        victim = core._seated[0]
        original, spoilt = type(core.runner.model).logits, []

        def spoil(model, hidden):
            """Once, NaN for the request's own next token."""
            logits = original(model, hidden)
            if core._seated and core._seated[0] is victim and not spoilt:
                spoilt.append(True)
                logits[0] = float("nan")
            return logits

        monkeypatch.setattr(type(core.runner.model), "logits", spoil)
        finished = rig.drain()
        assert spoilt and waits(rig)["undrawable"] == 1
        for index, ask in enumerate(asks):  # NaN came once: computed again without drafts all is well
            rig.compare(ask, finished[str(index)])


def test_a_proposer_that_fails_on_the_device_costs_drafts_alone(lab):
    asks = lab.seatable(4, max_tokens=24)
    with lab.rig("eagle", asks, "late", recorded=False, failures=True) as rig:
        rig.fail_every(7)
        rig.generate(asks)
        assert waits(rig)["proposer_failure"] > 0
        assert rig.metric("specdecode:proposer_failures") > 0


def test_a_device_step_reads_no_value(lab, monkeypatch):
    """Neither the step nor the proposer asks a tensor for its value: on a device that would be a wait."""
    asks = lab.seatable(4, max_tokens=16)
    with lab.rig("eagle", asks, "late", recorded=False) as rig:
        core, inside = rig.core, []
        core.runner.check_writes = False  # which looks
        run = core.steady.run

        def watched(*args):
            inside.append(True)
            try:
                return run(*args)
            finally:
                inside.pop()

        monkeypatch.setattr(core.steady, "run", watched)
        for name in ("item", "tolist", "numpy", "__int__", "__bool__", "__float__", "__index__"):
            original = getattr(torch.Tensor, name)

            def guard(tensor, *args, _name=name, _original=original, **kwargs):
                assert not inside or _allowed(), f"Tensor.{_name} within a step"
                return _original(tensor, *args, **kwargs)

            monkeypatch.setattr(torch.Tensor, name, guard)
        rig.generate(asks)


def _allowed():
    """The CPU's own implementations may look at values; what would be captured may not."""
    import inspect

    files = {frame.filename for frame in inspect.stack()[2:12]}
    return any("specdec_kernels" in file for file in files)


@pytest.mark.parametrize("method", ["none", "ngram", "eagle"])
def test_who_is_put_off_until_others_come_loses_nothing(lab, method):
    """Those in their seats go on meanwhile; when they have ended, or too long has passed, it is let in."""
    asks = lab.seatable(8, max_tokens=24)[:4]
    with lab.rig(method, asks, "late", max_num_batched_tokens=2048) as rig:
        for index in (0, 1):
            rig.add(str(index), asks[index])
        finished = {}
        while rig.core.scheduler.waiting or len(rig.core._seated) < 2:
            finished |= rig.step()
        admission = rig.core._admission
        admission._longest, admission._rate = 60.0, 1e6
        admission._pauses.append(1e3)  # never worth it
        for index in (2, 3):
            rig.add(str(index), asks[index])
        steps = rig.core.metrics.steps.total
        for _ in range(4):
            finished |= rig.step()
            assert len(rig.core.scheduler.waiting) == 2
        assert rig.core.metrics.steps.total >= steps + 3
        admission._longest = 0.0
        finished |= rig.step()
        assert not rig.core.scheduler.waiting
        finished |= rig.drain()
        for index, ask in enumerate(asks):
            rig.compare(ask, finished[str(index)])
        # Beside nobody there is nothing to wait for.
        admission._longest = 60.0
        admission._pauses.append(1e3)
        rig.generate(asks[:2])


def test_prompts_that_fill_a_step_wait_for_nobody(lab):
    """Others would not come in with them."""
    asks = lab.seatable(8, max_tokens=24)[:3]
    with lab.rig("none", asks, "late", max_num_batched_tokens=16) as rig:
        rig.add("0", asks[0])
        finished = {}
        while rig.core.scheduler.waiting or not rig.core._seated:
            finished |= rig.step()
        admission = rig.core._admission
        admission._longest, admission._rate = 60.0, 1e6
        admission._pauses.append(1e3)
        for index in (1, 2):
            rig.add(str(index), asks[index])
        assert rig.core.scheduler.admissible() == (2, sum(len(ask.prompt) for ask in asks[1:]) >= 16)
        finished |= rig.step()
        assert len(rig.core.scheduler.waiting) < 2
        finished |= rig.drain()
        for index, ask in enumerate(asks):
            rig.compare(ask, finished[str(index)])
