"""The synthetic rule: how many drafts it accepts, whatever they are, and that its results are marked."""

import logging

import attrs
import pytest
import torch
from specdecode import LLM, SamplingParams
from specdecode.contract import ConfigError, Unsupported
from specdecode.testing import scripted
from specdecode.testing.tiny import tiny_checkpoint
from specdecode.verify import RULES, Synthetic, Verdict, rule
from specdecode.verify.synthetic import take

SEEDS = 2000


@pytest.mark.parametrize(
    ("depth", "length", "rates"),
    [(3, 3.0, (1, 1, 0)), (4, 3.4, (1, 1, 0.4, 0)), (2, 1, (0, 0)), (2, 3, (1, 1)), (1, 1.25, (0.25,))],
)
def test_a_length_becomes_the_least_varied_rates(depth, length, rates):
    assert Synthetic.of(depth, None, length).rates == pytest.approx(rates)


def test_rates_are_of_all_drafts_up_to_each():
    assert Synthetic.of(3, (0.8, 0.4, 0.0), None).rates == pytest.approx((0.8, 0.5, 0.0))
    assert Synthetic.of(3, (0.8, 0.0, 0.0), None).rates == pytest.approx((0.8, 0.0, 0.0))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rates": (0.5,), "length": None}, "must have 3 numbers, one for each draft of a step, got 1"),
        ({"rates": None, "length": 4.5}, "must be 1 to 4 with 3 drafts a step, got 4.5"),
    ],
)
def test_they_must_fit_the_chain(given, message):
    with pytest.raises(ConfigError, match=message):
        Synthetic.of(3, **given)


def test_drafts_are_accepted_as_often_as_the_rates_say():
    wanted = (0.8, 0.4, 0.1)
    synthetic = Synthetic.of(3, wanted, None)
    counts = torch.tensor(synthetic.accepted(range(SEEDS), [17] * SEEDS, [3] * SEEDS))
    for place, rate in enumerate(wanted):
        share = (counts > place).float().mean().item()
        assert abs(share - rate) < 5 * (rate * (1 - rate) / SEEDS) ** 0.5, place
    assert synthetic.accepted(range(SEEDS), [17] * SEEDS, [1] * SEEDS) == counts.clamp(max=1).tolist()
    assert synthetic.accepted([7], [20], [3]) == synthetic.accepted([5, 7], [9, 20], [2, 3])[1:]


def test_accepted_drafts_come_whatever_the_target_drew():
    assert take([10, 11, 12], [5, 6], 0) == Verdict((), (10,))
    assert take([10, 11, 12], [5, 6], 1) == Verdict((0,), (5, 11))
    assert take([10, 11, 12], [5, 6], 2) == Verdict((0, 1), (5, 6, 12))


def test_it_is_not_lossless():
    synthetic = rule("synthetic", Synthetic((0.5,)))
    assert not synthetic.lossless and not synthetic.trees and synthetic.mark == "synthetic"
    assert all(RULES[name].lossless for name in ("invariant", "standard", "block"))


# -- in the engine ---------------------------------------------------------------------------------
SYNTHETIC = {"rejection_sample_method": "synthetic"}
PARAMS = SamplingParams(temperature=0.0, max_tokens=25, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    torch.set_num_threads(1)
    scripted.install()
    return str(tiny_checkpoint(tmp_path_factory.mktemp("tiny"), zero_outputs=True))


def engine(checkpoint, config, **keywords):
    return LLM(checkpoint, dtype="float32", speculative_config=config, **keywords)


def wrong_drafts(checkpoint, prompt):
    """A proposer whose three drafts are always there and always wrong."""
    with engine(checkpoint, None) as llm:
        text = llm.generate([prompt], PARAMS, use_tqdm=False)[0].outputs[0].token_ids
    return {"method": "scripted-eagle", "num_speculative_tokens": 3}, list(text)


@pytest.mark.parametrize("late", [False, True])
def test_a_run_advances_by_the_rates_and_says_so(checkpoint, caplog, late):
    prompt = {"prompt_token_ids": [60, 61, 62]}
    eagle, plain = wrong_drafts(checkpoint, prompt)
    with caplog.at_level(logging.WARNING, logger="specdecode"):
        llm = engine(
            checkpoint, eagle | SYNTHETIC | {"synthetic_acceptance_length": 3}, async_scheduling=late
        )
    assert "the output is not the model's" in caplog.text
    with llm:
        (output,) = llm.generate([prompt], PARAMS, use_tqdm=False)
        readings = {metric.name: metric for metric in llm.get_metrics()}
    assert output.outputs[0].token_sources == (["target", *["draft", "draft", "target"] * 8])
    assert output.metrics.synthetic and output.metrics.acceptance_length == 3
    assert list(output.outputs[0].token_ids) != plain
    accepted = readings["vllm:spec_decode_num_accepted_tokens_per_pos"]
    assert accepted.value == [8, 8, 0] and accepted.labels == {"acceptance": "synthetic"}
    assert readings["vllm:generation_tokens"].labels == {}


def test_other_rules_mark_nothing(checkpoint):
    with engine(checkpoint, {"method": "scripted-eagle", "num_speculative_tokens": 2}) as llm:
        (output,) = llm.generate([{"prompt_token_ids": [60]}], PARAMS, use_tqdm=False)
        assert not output.metrics.synthetic and output.metrics.lossy is None
        assert not any(metric.labels for metric in llm.get_metrics())


def test_what_it_cannot_serve_is_refused(checkpoint):
    length = SYNTHETIC | {"synthetic_acceptance_length": 2}
    tree = {"method": "scripted-eagle", "num_speculative_tokens": 2, "tree": [[0], [1]]}
    with pytest.raises(Unsupported, match="decides chains only: it has a rate for each draft of one path"):
        engine(checkpoint, tree | length)
    eagle = {"method": "scripted-eagle", "num_speculative_tokens": 2}
    with pytest.raises(Unsupported, match="does not keep equal: use 'invariant'"):
        engine(checkpoint, eagle | length, shadow_rate=0.5)
    with engine(checkpoint, eagle | length) as llm:
        params = attrs.evolve(PARAMS, structured_outputs={"regex": "a+"})
        with pytest.raises(ConfigError, match="structured_outputs cannot be kept under"):
            llm.generate([{"prompt_token_ids": [60]}], params, use_tqdm=False)
