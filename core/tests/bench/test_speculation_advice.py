"""The rules of docs/tuning.md: when which line is given, and how often."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
from specdecode.engine.advice import MIN_DRAFTS, Advisor, SpeculationFigures, advise
from specdecode.engine.metrics import EngineMetrics
from specdecode.engine.request import RequestStats


def figures(rate: float, *, drafts: int = 100, length: int = 10, propose: float = 0.0) -> SpeculationFigures:
    """Steps that all drafted ``length`` tokens; the target took a second."""
    accepted = round(rate * drafts * length)
    return SpeculationFigures(
        drafts=drafts,
        draft_tokens=drafts * length,
        accepted=accepted,
        decode_steps=drafts,
        decode_tokens=drafts + accepted,
        target_seconds=1.0,
        propose_seconds=propose,
    )


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.39])
def test_below_forty_percent_shorten_or_change(rate):
    advice = advise(figures(rate))
    assert advice.loss and advice.line == (
        f"{rate:.0%} of the drafts were accepted, less than 40%: shorten num_speculative_tokens, or try "
        "another method"
    )


@pytest.mark.parametrize("rate", [0.4, 0.6, 0.8])
def test_in_between_there_is_nothing_to_say(rate):
    assert advise(figures(rate)) is None and advise(figures(rate), speedup=1.5) is None


@pytest.mark.parametrize("rate", [0.81, 1.0])
def test_above_eighty_percent_lengthen(rate):
    advice = advise(figures(rate))
    assert not advice.loss
    assert (
        advice.line
        == f"{rate:.0%} of the drafts were accepted, more than 80%: lengthen num_speculative_tokens"
    )


@pytest.mark.parametrize("rate", [0.1, 0.6, 0.9])
def test_a_measured_loss_comes_before_all_else(rate):
    advice = advise(figures(rate), speedup=0.9)
    assert advice.loss and advice.line.startswith(
        "speculation loses time (0.90x the speed of plain decoding;"
    )
    assert "shorten num_speculative_tokens, try another method, or leave speculation out" in advice.line


def test_nothing_is_to_be_shortened_where_core_chooses_the_length():
    low, loss = advise(figures(0.1), adaptive=True), advise(figures(0.1), speedup=0.9, adaptive=True)
    assert low.line == "10% of the drafts were accepted, less than 40%: try another method"
    assert loss.line.endswith("10% of the drafts were accepted): try another method, or leave speculation "
                              "out for this work")  # fmt: skip
    assert advise(figures(0.9), adaptive=True) == advise(figures(0.9))  # the most may be too little
    assert Advisor(adaptive=True).tell(figures(0.1)).line == low.line


def test_without_a_plain_run_only_a_certain_loss_is_told():
    # Seven tokens a step, drafts in six times the target's time: even free verification could not help.
    assert advise(figures(0.6, propose=5.9)) is None
    advice = advise(figures(0.6, propose=6.1))
    assert advice.line.startswith(
        "speculation loses time (drafting took 6.10x the target's time for 7.00 tokens a step; 60%"
    )


def test_little_evidence_says_nothing():
    assert advise(figures(0.0, drafts=MIN_DRAFTS - 1)) is None
    assert advise(figures(0.0, drafts=MIN_DRAFTS)) is not None
    assert advise(SpeculationFigures()) is None


def test_every_line_is_one_line():
    for rate in (0.0, 0.5, 1.0):
        for speedup in (None, 0.5, 2.0):
            advice = advise(figures(rate), speedup)
            assert advice is None or "\n" not in advice.line


def test_small_runs_add_up(caplog):
    now = [0.0]
    advisor = Advisor(clock=lambda: now[0])
    told = [advisor.tell(figures(0.1, drafts=MIN_DRAFTS // 4)) for _ in range(5)]
    assert [advice is not None for advice in told] == [False, False, False, True, False]
    for _ in range(3):
        assert advisor.tell(figures(1.0)) is None  # within the minute, and yet not forgotten
    now[0] = 60.0
    assert "more than 80%" in advisor.tell(figures(1.0)).line
    now[0] = 120.0
    assert "less than 40%" in advisor.tell(figures(0.1)).line  # what was judged counts no more


def test_at_most_one_line_a_minute_and_losses_are_warnings(caplog):
    now = [0.0]
    advisor = Advisor(clock=lambda: now[0])
    with caplog.at_level(logging.INFO, "specdecode.engine.advice"):
        assert advisor.tell(figures(0.5)) is None  # nothing to say uses nothing up
        assert advisor.tell(figures(0.1)) is not None
        now[0] = 59.9
        assert advisor.tell(figures(1.0)) is None
        now[0] = 60.0
        assert advisor.tell(figures(0.9)) is not None
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_one_slow_span_is_no_loss_of_time():
    advisor = Advisor(interval=0.0)
    assert advisor.tell(figures(0.6, propose=60.0)) is None  # kernels were compiled
    assert advisor.tell(figures(0.6)) is None
    assert advisor.tell(figures(0.6, propose=6.1)) is None
    assert "loses time" in advisor.tell(figures(0.6, propose=6.1)).line
    assert "loses time" in advisor.tell(figures(0.6, propose=6.1)).line


def test_figures_are_read_from_the_engines_metrics():
    metrics = EngineMetrics(depth=4)
    stats = RequestStats(arrival=0.0)
    metrics.delivered(stats, drafted=0, accepted=0, kept=1, now=1.0)
    before = SpeculationFigures.read(metrics)
    metrics.delivered(stats, drafted=4, accepted=3, kept=4, now=2.0)
    metrics.delivered(stats, drafted=0, accepted=0, kept=1, now=3.0)
    metrics.target_seconds.inc(2.0)
    metrics.propose_seconds.inc(0.5)
    span = SpeculationFigures.read(metrics) - before
    assert span == SpeculationFigures(
        drafts=1, draft_tokens=4, accepted=3, decode_steps=2, decode_tokens=5, target_seconds=2.0,
        propose_seconds=0.5,
    )  # fmt: skip
    assert (span.acceptance_rate, span.tokens_per_step, span.draft_overhead) == (0.75, 2.5, 0.25)
    assert span.best_speedup == 2.0


def test_the_rules_need_no_torch():
    code = "import sys, specdecode.engine.advice; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_manual_has_the_same_rules():
    page = (Path(__file__).parents[3] / "docs/tuning.md").read_text(encoding="utf-8")
    assert "below 40%" in page and "above 80%" in page and f"{MIN_DRAFTS} verifications" in page
