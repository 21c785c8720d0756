"""Shadow mode: a share of the finished completions again without speculation, compared and counted."""

from __future__ import annotations

import logging
import math

import pytest
from specdecode.contract import ConfigError

LOGGER = "specdecode.api.shadow"
in_both_orders = pytest.mark.parametrize("order", ["plain", "late"])


def make(lab, asks, method="oracle", rate=1.0, order="plain", **options):
    """An engine with a recorded drafter; texts of requests that a reference cannot decode are passed over."""
    return lab.rig(lab.config(method, texts(lab, asks)), (), order, shadow_rate=rate, **options)


def texts(lab, asks):
    return lab.texts([ask for ask in asks if not ask.params.stop and not ask.params.logits_processors])


def generate(rig, asks):
    prompts = [{"prompt_token_ids": ask.prompt} for ask in asks]
    return rig.llm.generate(prompts, [ask.params for ask in asks], use_tqdm=False)


def counted(rig):
    """Checked, ties, bugs."""
    seen = {(metric.name, metric.labels.get("kind")): metric.value for metric in rig.llm.get_metrics()}
    return (
        seen["specdecode:shadow_checked", None],
        seen["specdecode:shadow_mismatches", "tie"],
        seen["specdecode:shadow_mismatches", "bug"],
    )


def users_metrics(rig):
    """Every count that is not shadow mode's own, and not of a clock."""
    return {
        metric.name: metric.value
        for metric in rig.llm.get_metrics()
        if not any(part in metric.name for part in ("shadow", "seconds", "host_waits"))
    } | {
        metric.name: metric.value["count"]
        for metric in rig.llm.get_metrics()
        if isinstance(metric.value, dict)
    }


# -- no mismatch ----------------------------------------------------------------------------------------
@in_both_orders
@pytest.mark.parametrize("method", ["oracle", "ngram", "oracle-tree", "self-draft", "eagle3"])
def test_right_outputs_match_and_the_user_sees_nothing(lab, method, order):
    """Greedy, seeded and unseeded requests, under penalties, ``n`` of them, stopped: all are checked."""
    asks = [
        *lab.mixed(),
        lab.ask(lab.prompt(2), temperature=0.8, seed=4, n=3, max_tokens=9),
        lab.ask(lab.prompt(1), temperature=0, max_tokens=12, stop_token_ids=lab.expected(lab.mixed()[4])[:2]),
    ]
    outputs, metrics, alive = [], [], []
    for rate in (0.0, 1.0):
        with make(lab, asks, method, rate, order) as rig:
            outputs.append(rig.generate(asks))
            metrics.append(users_metrics(rig))
            if rate:
                assert counted(rig) == (len(asks) + 2, 0, 0)
            alive.append({event.request_id for event in rig.recording.events})
    assert metrics[0] == metrics[1]
    assert len(alive[0]) == len(alive[1]) == len(asks) + 2, "the drafter hears of users' requests only"
    for one, other in zip(*outputs, strict=True):
        assert [c.token_ids for c in one.outputs] == [c.token_ids for c in other.outputs]


def test_unseeded_requests_are_drawn_again_with_their_noise(lab):
    asks = [lab.ask(lab.prompt(index), temperature=1.0, n=2, max_tokens=14) for index in range(3)]
    with lab.rig("ngram", (), recorded=False, shadow_rate=1.0) as rig:
        ids = [tuple(c.token_ids) for output in generate(rig, asks) for c in output.outputs]
        assert len(set(ids)) == 6 and counted(rig) == (6, 0, 0)


def test_stop_strings_end_the_copy_too(lab):
    letters = [3 + byte for byte in b"abcdefgh"]
    base = lab.ask(lab.prompt(1), temperature=0.7, seed=1, allowed_token_ids=letters, max_tokens=20)
    text = "".join(chr(token - 3) for token in lab.expected(base))
    asks = [
        lab.ask(
            base.prompt, **LAW, allowed_token_ids=letters, stop=[text[place : place + 2]], min_tokens=least
        )
        for place in (3, 6, 9)
        for least in (0, 5)
    ]
    with lab.rig(
        lab.config("oracle", lab.texts([base])), (), shadow_rate=1.0, skip_tokenizer_init=False
    ) as rig:
        outputs = generate(rig, asks)
        reasons = [output.outputs[0].finish_reason for output in outputs]
        assert reasons[::2] == ["stop"] * 3
        assert counted(rig) == (len(asks), 0, 0)


LAW = {"temperature": 0.7, "seed": 1, "max_tokens": 20}


# -- what is chosen -------------------------------------------------------------------------------------
def test_the_choice_is_a_share_and_is_the_same_again(lab):
    asks = [lab.ask([5 + index], temperature=0, max_tokens=2) for index in range(200)]

    def chosen(rate, **options):
        with make(lab, [], "ngram", rate, **options) as rig:
            names = []
            shadow = rig.llm.llm_engine._shadow
            request = shadow._request
            shadow._request = lambda original: names.append(original.name) or request(original)
            generate(rig, asks)
            assert counted(rig)[0] == len(set(names)) == len(names)
            return set(names)

    third = chosen(0.3)
    assert abs(len(third) - 60) < 4 * math.sqrt(200 * 0.3 * 0.7)
    assert chosen(0.3, max_num_seqs=3, order="late") == third
    assert chosen(0.1) < third
    assert not chosen(1e-6)


class Stateful:
    def __call__(self, output_ids, logits):
        return logits


class Cloned(Stateful):
    def clone(self):
        return Cloned()


def raising(output_ids, logits):
    raise RuntimeError("broken on purpose")


@in_both_orders
def test_what_cannot_be_repeated_is_not_checked(lab, order):
    """Failed and aborted requests, and processors that there is no second one of."""
    asks = {
        "stateful": lab.ask(lab.prompt(0), temperature=0, max_tokens=5, logits_processors=[Stateful()]),
        "cloned": lab.ask(lab.prompt(1), temperature=0, max_tokens=5, logits_processors=[Cloned()]),
        "failed": lab.ask(lab.prompt(2), temperature=0, max_tokens=5, logits_processors=[raising]),
        "aborted": lab.ask(lab.prompt(3), temperature=0, max_tokens=50),
    }
    with make(lab, [], "ngram", order=order) as rig:
        for name, ask in asks.items():
            rig.add(name, ask)
        finished = rig.step(3)
        rig.abort("aborted")
        finished |= rig.drain()
        assert finished["failed"].outputs[0].finish_reason == "error"
        assert counted(rig) == (1, 0, 0)


def test_a_rule_that_keeps_laws_and_not_tokens_is_refused(lab):
    from specdecode.contract import Unsupported
    from specdecode.verify import RULES

    weighing = [name for name, rule in RULES.items() if rule.weigh is not None]
    assert weighing
    for name in weighing:
        config = lab.config("ngram") | {"rejection_sample_method": name}
        with pytest.raises(Unsupported, match=r"shadow_rate=1.0 compares tokens .* use 'invariant'"):
            lab.rig(config, (), recorded=False, shadow_rate=1.0)


# -- mismatches -----------------------------------------------------------------------------------------
def corrupt(core):
    """What a verified row drew is off by one where its drafts were all accepted."""
    import attrs

    verify = core.verification.verify
    if hasattr(core, "steady"):  # where rows go on by themselves, on what they report and go on from
        run = core.steady.run

        def steadily(rows, tokens, draft):
            output = run(rows, tokens, draft)
            report = output.results.report
            for row, (count, accepted, drafted, *_) in enumerate(report.tolist()):
                if accepted == drafted > 0:
                    wrong = (report[row, 2 + count] + 1) % 300
                    report[row, 2 + count :] = core.steady.seats.last[row] = wrong
            return output

        core.steady.run = steadily

    def mutant(plan, target):
        verdicts, outcomes = verify(plan, target)
        for index, (verdict, outcome) in enumerate(zip(verdicts, outcomes, strict=True)):
            if len(verdict.accepted) == outcome.drafted > 0:
                tokens = (*verdict.tokens[:-1], (verdict.tokens[-1] + 1) % 300)
                verdicts[index] = attrs.evolve(verdict, tokens=tokens)
                outcomes[index] = attrs.evolve(outcome, drawn=attrs.evolve(outcome.drawn, ids=tokens))
        return verdicts, outcomes

    core.verification.verify = mutant


@in_both_orders
def test_a_wrong_token_is_a_bug_and_told_in_one_line(lab, order, caplog):
    asks = [lab.ask(lab.prompt(index), temperature=0, max_tokens=16) for index in range(3)]
    told = texts(lab, asks[:2])
    with lab.rig(
        lab.config("oracle", told) | {"wrong_at": []}, (), order, recorded=False, shadow_rate=1.0
    ) as rig:
        corrupt(rig.core)
        with caplog.at_level(logging.INFO, LOGGER):
            outputs = generate(rig, asks)
        assert counted(rig) == (3, 0, 2)
    lines = [record.getMessage() for record in caplog.records if record.name == LOGGER]
    assert len(lines) == 2 and all(record.levelno == logging.ERROR for record in caplog.records)
    place = 5  # the prompt's own token, four drafts, and then the one that was changed
    got, want = outputs[0].outputs[0].token_ids[place], lab.expected(asks[0])[place]
    assert got == (want + 1) % 300
    assert lines[0].startswith(
        f"shadow: request 0/0: with speculation (a) and without (b): bug at output token {place}: {got} "
    )
    assert f"and {want} (logit" in lines[0] and "bf16 steps" in lines[0]


def test_a_tie_is_a_tie(lab, caplog):
    """Two tokens whose logits are made equal: which of them is drawn is rounding's business."""
    ask = lab.ask(lab.prompt(2), temperature=0, max_tokens=3, logprobs=2)
    with lab.rig("none", (), recorded=False) as rig:
        (output,) = generate(rig, [ask])
    (best, second) = sorted(output.outputs[0].logprobs[2].items(), key=lambda item: -item[1].logprob)[:2]
    bias = best[1].logprob - second[1].logprob
    near = lab.ask(ask.prompt, temperature=0, max_tokens=3, logit_bias={second[0]: bias})
    (before,) = ([*output.outputs[0].token_ids][:2],)
    with lab.rig(
        lab.config("oracle", [ask.prompt + before + [best[0]]]) | {"wrong_at": []},
        (),
        recorded=False,
        shadow_rate=1.0,
    ) as rig:
        corrupt_to(rig.core, {best[0]: second[0], second[0]: best[0]})
        with caplog.at_level(logging.INFO, LOGGER):
            generate(rig, [near])
        assert counted(rig) == (1, 1, 0)
    assert "tie at output token 2" in caplog.text


def corrupt_to(core, swap):
    """The last token of a row that had drafts is another."""
    import attrs

    verify = core.verification.verify

    def mutant(plan, target):
        verdicts, outcomes = verify(plan, target)
        for index, (verdict, outcome) in enumerate(zip(verdicts, outcomes, strict=True)):
            if outcome.drafted:
                tokens = (*verdict.tokens[:-1], swap.get(verdict.tokens[-1], verdict.tokens[-1]))
                verdicts[index] = attrs.evolve(verdict, tokens=tokens)
                outcomes[index] = attrs.evolve(outcome, drawn=attrs.evolve(outcome.drawn, ids=tokens))
        return verdicts, outcomes

    core.verification.verify = mutant


@pytest.mark.parametrize(
    ("place", "told"), [(6, "the end"), (11, "Finish(reason='stop', stop_reason=None) with speculation")]
)
def test_an_end_where_there_is_none_is_a_bug(lab, caplog, place, told):
    """The request stops where it was never told to; at its last token, that is but a wrong reason."""
    ask = lab.ask(lab.prompt(1), temperature=0, max_tokens=12)
    with make(lab, [ask]) as rig:
        rig.add("q", ask)
        (request,) = rig.core.outputs
        request.eos_ids = frozenset(lab.expected(ask)[place : place + 1])
        with caplog.at_level(logging.INFO, LOGGER):
            rig.drain()
        assert counted(rig) == (1, 0, 1)
    assert f"bug at output token {place + 1}: " in caplog.text and told in caplog.text


def test_a_cache_that_lies_is_seen(lab):
    """The copy computes its prompt itself: wrong KV in the prefix cache is the user's alone."""
    stem = lab.prompt(5)
    asks = [lab.ask([*stem, tail], temperature=0, max_tokens=16) for tail in (9, 10)]
    with lab.rig("ngram", (), recorded=False, shadow_rate=1.0) as rig:
        generate(rig, asks[:1])
        assert counted(rig) == (1, 0, 0)
        for key, value in rig.core.runner.store.target:
            key.mul_(-1)
            value.mul_(3)
        generate(rig, asks[1:])
        assert counted(rig) == (2, 0, 1)


# -- whom it disturbs -------------------------------------------------------------------------------------
def copies(rig):
    return [request for request in rig.core.scheduler.running if request.background]


def test_copies_run_one_at_a_time_beside_users_and_many_alone(lab):
    asks = [lab.ask(lab.prompt(index % 4), temperature=0, max_tokens=6) for index in range(5)]
    long = lab.ask(lab.prompt(0), temperature=0, max_tokens=100)
    with make(lab, [], "ngram") as rig:
        rig.add("long", long)
        for number, ask in enumerate(asks):
            rig.add(str(number), ask)
        beside, alone = set(), set()
        while rig.llm.llm_engine.has_unfinished_requests():
            rig.step()
            (beside if rig.core.scheduler.num_running else alone).add(len(copies(rig)))
        assert beside == {0, 1}
        assert max(alone, default=0) <= rig.core.scheduler.config.max_num_seqs
        assert counted(rig) == (6, 0, 0)
    with make(lab, [], "ngram") as rig:
        for number, ask in enumerate(asks):
            rig.add(str(number), ask)
        most = 0
        while rig.llm.llm_engine.has_unfinished_requests():
            rig.step()
            most = max(most, len(copies(rig)))
        assert most >= 4


@in_both_orders
def test_a_copy_makes_room_for_a_user(lab, order):
    """One row, and a pool for one request: who comes waits a step at most, and is never preempted."""
    first = lab.ask(lab.prompt(1), temperature=0, max_tokens=20)
    then = lab.ask(lab.prompt(2), temperature=0, max_tokens=20)
    with make(
        lab, [first, then], order=order, max_num_seqs=1, num_gpu_blocks_override=12, max_model_len=48
    ) as rig:
        rig.add("first", first)
        while not copies(rig):
            rig.step()
        rig.step()
        rig.add("then", then)
        rig.step(2)
        assert rig.core.scheduler.num_running == 1 and not copies(rig)
        finished = rig.drain()
        rig.compare(then, finished["then"])
        assert finished["then"].metrics.preemptions == 0
        assert counted(rig) == (2, 0, 0)


@in_both_orders
def test_a_full_pool_takes_from_the_copy(lab, order):
    """A running user who needs blocks gets the copy's, also if the user is the younger one.

    Drafts are made for the first request alone, so that the users outlast its copy.
    """
    short = lab.ask(lab.prompt(0), temperature=0, max_tokens=40)
    users = [lab.ask(lab.prompt(index), temperature=0, max_tokens=60) for index in (1, 2)]
    with make(lab, [short], order=order, num_gpu_blocks_override=38) as rig:
        rig.add("short", short)
        rig.add("a", users[0])
        while not copies(rig):
            rig.step()
        (copy,) = copies(rig)
        rig.add("b", users[1])
        finished = rig.drain()
        assert copy.stats.preemptions > 0
        for name, ask in (("a", users[0]), ("b", users[1])):
            rig.compare(ask, finished[name])
            assert finished[name].metrics.preemptions == 0
        assert rig.metric("vllm:num_preemptions") == 0
        assert counted(rig) == (3, 0, 0)


def test_a_queue_that_grows_too_long_is_cut_and_counted(lab, monkeypatch):
    import specdecode.api.shadow as shadow

    monkeypatch.setattr(shadow, "MOST_WAITING", 2)
    asks = [lab.ask([9], temperature=0, max_tokens=3) for _ in range(6)]
    with make(lab, [], "ngram") as rig:
        generate(rig, asks)
        checked, passed_over = counted(rig)[0], rig.metric("specdecode:shadow_passed_over")
        assert checked + passed_over == 6 and passed_over >= 1


def test_generate_comes_back_when_all_is_checked(lab):
    asks = lab.mixed(4)
    with make(lab, asks, order="late") as rig:
        rig.generate(asks)
        assert not rig.llm.llm_engine.has_unfinished_requests() and counted(rig)[0] == 4
        assert rig.llm.reset_prefix_cache()
        rig.generate(asks[:1])
        assert counted(rig) == (5, 0, 0)


def test_shutdown_with_copies_under_way(lab):
    ask = lab.ask(lab.prompt(1), temperature=0, max_tokens=20)
    with make(lab, [ask]) as rig:
        rig.add("q", ask)
        while not copies(rig):
            rig.step()
        rig.llm.shutdown()
        assert not rig.llm.llm_engine.has_unfinished_requests()
        assert rig.core.scheduler.pool.num_free == rig.core.scheduler.pool.num_blocks


# -- the keyword ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rate", [-0.1, 1.5, math.nan, math.inf])
def test_a_rate_is_between_0_and_1(rate):
    from specdecode import EngineArgs

    with pytest.raises(ConfigError, match=r"shadow_rate.*must be (between 0 and 1|a finite number), got"):
        EngineArgs("x", shadow_rate=rate, speculative_config={"method": "ngram"})


@pytest.mark.parametrize("rate", ["0.1", True, [0.1]])
def test_a_rate_is_a_number(rate):
    from specdecode import EngineArgs

    with pytest.raises(ConfigError, match="shadow_rate"):
        EngineArgs("x", shadow_rate=rate, speculative_config={"method": "ngram"})


def test_without_speculation_there_is_nothing_to_check():
    from specdecode import EngineArgs

    with pytest.raises(ConfigError, match=r"shadow_rate=0.5 has no effect without speculation"):
        EngineArgs("x", shadow_rate=0.5)
    assert EngineArgs("x", shadow_rate=0).shadow_rate == 0


def test_without_shadow_mode_there_are_no_counts_of_it(lab):
    with make(lab, [], "ngram", rate=0.0) as rig:
        assert not any("shadow" in metric.name for metric in rig.llm.get_metrics())
