"""Code of others that raises: proposers in every hook, stop conditions, progress bars."""

from __future__ import annotations

import logging

import pytest

ORDERS = pytest.mark.parametrize("order", ["plain", "late"])
HOOKS = ("on_add", "on_commit", "on_preempt", "on_finish", "propose", "metrics", "close")


class Broken(Exception):
    """What the test raises."""


def broken(*args):
    raise Broken("on purpose")


@ORDERS
@pytest.mark.parametrize("method", ["ngram", "self-draft"])
@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_that_always_raises(lab, monkeypatch, method, hook, order, caplog):
    """Drafting may end; no output changes, nothing is left, and the log is not flooded."""
    asks = lab.mixed(6, max_tokens=14)
    with (
        caplog.at_level(logging.ERROR),
        lab.rig(method, asks, order, num_gpu_blocks_override=32, failures=True, recorded=False) as rig,
    ):
        proposer = rig.core.drafting.proposer.proposer
        monkeypatch.setattr(proposer, hook, broken)
        rig.generate(asks)
        rig.generate(asks[::-1])
        failures = rig.metric("specdecode:proposer_failures")
        assert (failures == 0) == (hook in ("metrics", "close"))
        assert rig.llm.get_metrics()
    assert len(caplog.records) <= 3


@pytest.mark.parametrize("hook", ["load", "bind", "warm"])
def test_a_hook_that_raises_at_construction(lab, monkeypatch, hook):
    """The engine is not made; the error is the proposer's own, and the next engine is none the worse."""
    from specdecode.testing.scripted.oracle import OracleProposer

    asks = lab.mixed(2)
    with monkeypatch.context() as patch:
        patch.setattr(OracleProposer, hook, broken, raising=False)
        with pytest.raises(Broken, match="on purpose"):
            lab.rig("oracle", asks)
    with lab.rig("oracle", asks) as rig:
        rig.generate(asks)


@ORDERS
def test_a_stop_condition_that_raises(lab, monkeypatch, order):
    """The request that has it ends with an error; its neighbours have none."""
    from specdecode.engine import output

    plain = [lab.ask(lab.prompt(index), temperature=0, max_tokens=12) for index in range(4)]
    find = output.find_stop

    def find_stop(text, new_chars, stops):
        if "unlucky" in stops and new_chars:
            raise Broken("on purpose")
        return find(text, new_chars, stops)

    monkeypatch.setattr(output, "find_stop", find_stop)
    with lab.rig("self-draft", plain, order, skip_tokenizer_init=False) as rig:
        params = [ask.params for ask in plain]
        params[2] = params[2].clone(stop=["unlucky"])
        prompts = [{"prompt_token_ids": ask.prompt} for ask in plain]
        outputs = rig.llm.generate(prompts, params, use_tqdm=False)
        for place, (ask, result) in enumerate(zip(plain, outputs, strict=True)):
            if place != 2:
                rig.compare(ask, result)
        (completion,) = outputs[2].outputs
        assert completion.finish_reason == "error" and "Broken: on purpose" in completion.error
        assert list(completion.token_ids) == lab.expected(plain[2])[: len(completion.token_ids)]
        rig.generate(plain)


@ORDERS
def test_a_progress_bar_that_raises(lab, monkeypatch, order):
    from specdecode.api import llm

    asks = lab.mixed(4)
    prompts = [{"prompt_token_ids": ask.prompt} for ask in asks]
    with lab.rig("ngram", asks, order) as rig:
        with monkeypatch.context() as patch:
            patch.setattr(llm.tqdm, "update", broken)
            with pytest.raises(Broken):
                rig.llm.generate(prompts, [ask.params for ask in asks], use_tqdm=True)
        rig.drain()
        rig.core.scheduler.pool.check([])
        rig.generate(asks)


@ORDERS
def test_a_request_that_somebody_aborts_is_missed(lab, order):
    """``generate`` does not wait for ever for a request that is gone."""
    from specdecode.contract import SpecdecodeError

    asks = lab.mixed(3, max_tokens=12)
    with lab.rig("none", asks, order) as rig:
        steps = []
        step = rig.llm.llm_engine.step

        def stepped():
            steps.append(None)
            if len(steps) == 3:
                rig.abort("1")
            return step()

        rig.llm.llm_engine.step = stepped
        with pytest.raises(SpecdecodeError, match="1 of 3 requests were aborted"):
            rig.generate(asks)
        rig.generate(asks)
