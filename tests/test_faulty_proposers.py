"""A proposer that raises or lies harms no request: the worst it can do is to give no drafts."""

from __future__ import annotations

import logging

import pytest

#: What drafting can do wrong, and whether core counts drafts as dropped for it.
DROPPED = (
    "id-too-high",
    "id-huge",
    "id-negative",
    "cyclic-parents",
    "late-parent",
    "parent-below-root",
    "too-many",
    "more-than-width",
)
HARMLESS = ("negative-lens", "past-room", "keeps-buffers", "nan-scores", "writes-into-view")
RAISES = (
    "raises",
    "raises-half-way",
    "exits",
    "raises-in-on-add",
    "raises-in-on-commit",
    "raises-in-on-preempt",
    "raises-in-on-finish",
    "replaces-buffers",
)

in_both_orders = pytest.mark.parametrize("order", ["plain", "late"])
in_both_places = pytest.mark.parametrize("place", ["host", "device"])


def faulty(lab, asks, fault, **options):
    return {
        "method": "scripted-faulty",
        "fault": fault,
        "texts": lab.texts(asks),
        "num_speculative_tokens": 6,
        **options,
    }


def start(lab, asks, order, config, **options):
    rig = lab.rig(config, asks, order, failures=True, recorded=False, **options)
    rig.stateless = False
    return rig


@in_both_orders
@in_both_places
@pytest.mark.parametrize("fault", [*DROPPED, *HARMLESS])
def test_bad_drafts(lab, fault, place, order):
    asks = lab.mixed()
    with start(lab, asks, order, faulty(lab, asks, fault, place=place)) as rig:
        rig.generate(asks)
        rig.generate(asks)  # whatever it scribbled on, later requests are served
        # Static steps have one set of buffers: what is scribbled into them later is seen, and dropped.
        seen = fault == "keeps-buffers" and (place, order) == ("device", "late")
        assert (rig.metric("specdecode:drafts_dropped_by_fault") > 0) == (fault in DROPPED or seen)
        assert rig.metric("specdecode:proposer_failures") == 0
        nothing_is_left = fault in ("cyclic-parents", "negative-lens")
        assert (rig.metric("vllm:spec_decode_num_accepted_tokens") == 0) == nothing_is_left


@in_both_orders
@in_both_places
@pytest.mark.parametrize("fault", RAISES)
def test_exceptions(lab, fault, place, order, caplog):
    """Now and then, under preemption: counted, and the other steps are drafted for."""
    asks = lab.mixed(max_tokens=24)
    config = faulty(lab, asks, fault, place=place, every=3)
    with caplog.at_level(logging.ERROR), start(lab, asks, order, config, num_gpu_blocks_override=40) as rig:
        rig.generate(asks)
        assert rig.metric("vllm:num_preemptions") > 0
        assert rig.metric("specdecode:proposer_failures") > 0
        assert rig.metric("vllm:spec_decode_num_accepted_tokens") > 0
        assert any("scripted-faulty" in record.getMessage() for record in caplog.records)


@in_both_orders
def test_always_raising_is_not_asked_for_ever(lab, order, caplog):
    asks = lab.mixed()
    with caplog.at_level(logging.ERROR), start(lab, asks, order, faulty(lab, asks, "raises")) as rig:
        rig.generate(asks)
        failures = rig.metric("specdecode:proposer_failures")
        rig.generate(asks)
        assert 0 < rig.metric("specdecode:proposer_failures") == failures
        assert rig.metric("vllm:spec_decode_num_draft_tokens") == 0
        assert len(caplog.records) <= 3


@in_both_orders
def test_strict_mode_raises(lab, order):
    from specdecode import EngineArgs, LLMEngine
    from specdecode.plugins import PluginManager
    from specdecode.testing import scripted
    from specdecode.testing.scripted.faulty import BrokenOnPurpose

    manager = PluginManager(strict=True)
    scripted.install(manager)
    (ask,) = lab.mixed(1)
    args = EngineArgs(
        model=str(lab.target),
        skip_tokenizer_init=True,
        num_gpu_blocks_override=40,
        max_model_len=64,
        async_scheduling=order == "late",
        speculative_config=faulty(lab, [ask], "raises"),
    )
    engine = LLMEngine(args, manager)
    engine.add_request("a", {"prompt_token_ids": ask.prompt}, ask.params)
    with pytest.raises(BrokenOnPurpose):
        engine.step()
    engine.shutdown()


@pytest.mark.parametrize("fault", ["past-room", "too-many"])
def test_drafts_past_the_context(lab, fault):
    asks = [lab.ask(lab.prompt(6)[:length], temperature=0, max_tokens=100) for length in (3, 24, 30, 31)]
    with start(lab, asks, "plain", faulty(lab, asks, fault), max_model_len=32) as rig:
        rig.generate(asks)
        rig.generate(asks)


def test_neighbours_of_a_fault_are_drafted_for(lab):
    """One row's bad drafts cost that row alone."""
    asks = lab.mixed()
    config = faulty(lab, asks, "id-too-high")
    config["texts"] = lab.texts(asks[:4])
    with start(lab, asks, "plain", config) as rig:
        outputs = rig.generate(asks)
        assert all(output.metrics.accepted > 0 for output in outputs[:4])
        assert all(output.metrics.drafted == 0 for output in outputs[4:])


def test_metrics_that_raise(lab, caplog):
    """Told once; the drafts are as good as any."""
    asks = lab.mixed(2)
    config = faulty(lab, asks, "raises-in-metrics")
    with caplog.at_level(logging.ERROR), start(lab, asks, "plain", config) as rig:
        rig.generate(asks)
        assert rig.llm.get_metrics() and rig.llm.get_metrics()
        assert rig.metric("specdecode:proposer_failures") == 0
    (record,) = caplog.records
    assert record.getMessage() == "proposer scripted-faulty failed in metrics; it has none"
