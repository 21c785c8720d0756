"""The comparison itself, on engines whose speed and tokens are known exactly."""

from types import SimpleNamespace

import pytest
from specdecode import SamplingParams
from specdecode.bench.counters import Counters
from specdecode.bench.report import advice_on, as_json, cost_table_of, overall, rows_of, table_of
from specdecode.bench.running import Settings, compare, count_runs, encode, fitting
from specdecode.bench.tasks import Prompt, Task
from specdecode.contract import ConfigError

GREEDY = SamplingParams(temperature=0, max_tokens=6)


class Characters:
    """A tokenizer of one id a character; special tokens: 0 in front."""

    chat_template = None

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [0] * add_special_tokens + [ord(c) for c in text]}

    def apply_chat_template(self, messages, *, add_generation_prompt, tokenize, **other):
        assert add_generation_prompt and not tokenize and not any(other.values())
        return "".join(f"<{m['role']}>{m['content']}" for m in messages)


class FakeEngine:
    """Continues every prompt with its own last character; ``drafted`` tokens of each step are drafts.

    A step takes a second of the shared clock, ``propose`` more if it drafts, of which a half is the
    target's. ``wrong``: prompts whose third token is another.
    """

    def __init__(self, clock, drafted=0, wrong=(), log=None, propose=0.0, labels=None, adaptive=False):
        self.labels, self.adaptive = labels or {}, adaptive
        self.clock, self.drafted, self.wrong, self.propose = clock, drafted, wrong, propose
        self.log = [] if log is None else log
        self.counts = dict.fromkeys(("generated", "decode", "steps", "drafts", "accepted", "gaps"), 0)
        self.gap_seconds = 0.0

    def get_tokenizer(self):
        return Characters()

    def generate(self, prompts, params, *, use_tqdm):
        assert not use_tqdm
        self.log.append((self, ["".join(map(chr, p["prompt_token_ids"][1:])) for p in prompts], params))
        outputs = []
        for prompt in prompts:
            ids = prompt["prompt_token_ids"]
            tokens = [ids[-1]] * params.max_tokens
            if chr(ids[-1]) in self.wrong:
                tokens[2] = 1
            steps = -(-(len(tokens) - 1) // (1 + self.drafted))
            self.counts["generated"] += len(tokens)
            self.counts["decode"] += len(tokens) - 1
            self.counts["steps"] += steps
            self.counts["drafts"] += steps * bool(self.drafted)
            self.counts["accepted"] += len(tokens) - 1 - steps
            seconds = steps * (1 + self.propose * bool(self.drafted))
            self.clock.now += seconds
            self.counts["gaps"] += 1
            self.gap_seconds += seconds / (len(tokens) - 1)
            outputs.append(SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens)], prompt_token_ids=ids))
        return outputs

    def get_metrics(self):
        c = self.counts
        values = {
            "vllm:generation_tokens": c["generated"],
            "specdecode:decode_tokens": c["decode"],
            "specdecode:decode_steps": c["steps"],
            "specdecode:steps": c["steps"],
            "specdecode:target_seconds": c["steps"] / 2,
            "specdecode:verify_seconds": c["steps"] / 8,
            "specdecode:propose_seconds": c["steps"] * self.propose * bool(self.drafted),
            "vllm:inter_token_latency_seconds": {"count": c["gaps"], "sum": self.gap_seconds},
        }
        if self.adaptive:
            values["specdecode:expected_speedup"] = 1.0
        if self.drafted:
            values["vllm:spec_decode_num_drafts"] = c["drafts"]
            values["vllm:spec_decode_num_draft_tokens"] = c["drafts"] * self.drafted
            values["vllm:spec_decode_num_accepted_tokens"] = c["accepted"]
            values["vllm:spec_decode_num_accepted_tokens_per_pos"] = [c["drafts"]] * self.drafted
        return [SimpleNamespace(name=name, value=value, labels=self.labels) for name, value in values.items()]


@pytest.fixture
def clock():
    return SimpleNamespace(now=0.0)


def task(name, texts):
    prompts = tuple(Prompt(id=f"{name}{i}", text=text) for i, text in enumerate(texts))
    return Task(name=name, summary=name, prompts=prompts)


def run(clock, plain, speculative, tasks, **settings):
    return list(
        compare(plain, speculative, "m", tasks, GREEDY, Settings(**settings), clock=lambda: clock.now)
    )


def test_figures_of_a_comparison(clock):
    # 6 tokens: one from the prompt, then five in 5 steps or, with four drafts accepted, in one.
    plain, speculative = FakeEngine(clock), FakeEngine(clock, drafted=4)
    (comparison,) = run(clock, plain, speculative, [task("t", "ab")], repeats=2)
    assert comparison.plain.tokens_per_s == 6 / 5 and comparison.speculative.tokens_per_s == 6
    assert comparison.speedup == pytest.approx(5) and comparison.identical
    first, second = rows_of([comparison])
    assert (first.task, first.method, first.batch_size) == ("t", "plain", 1)
    assert (first.speedup, first.tokens_per_target_step, first.identical) == (1.0, 1.0, True)
    assert first.acceptance_length is None and first.acceptance_per_position is None
    assert (second.method, second.speedup, second.identical) == ("m", pytest.approx(5), True)
    assert (second.acceptance_length, second.tokens_per_target_step) == (5, 5)
    assert second.acceptance_per_position == (1, 1, 1, 1)


def test_costs_of_a_comparison(clock):
    # Five decode tokens in one step of 1.5 seconds, of which drafting took half a second.
    plain, speculative = FakeEngine(clock), FakeEngine(clock, drafted=4, propose=0.5)
    (comparison,) = run(clock, plain, speculative, [task("t", "ab")], repeats=2)
    first, second = rows_of([comparison])
    assert second.speedup == pytest.approx(5 / 1.5) and second.acceptance_rate == 1
    assert second.drafts_per_target_step == 4
    # Drafting cost half a plain step for four tokens, and a step gave five.
    assert second.cost_ratio == pytest.approx(0.5 / 4)
    assert second.memory_bound_speedup == pytest.approx(5 / (0.125 * 4 + 1))
    assert second.efficiency == pytest.approx(5 / 1.5 / 5) and second.draft_overhead == 1.0
    for row in (first, second):
        parts = (row.target_seconds, row.verify_seconds, row.propose_seconds, row.other_seconds)
        assert sum(parts) == pytest.approx(row.seconds)
    assert (second.seconds, second.target_seconds, second.verify_seconds) == (6, 2, 0.5)
    assert (second.propose_seconds, second.other_seconds) == (2, 1.5)
    drafting = ("acceptance_rate", "drafts_per_target_step", "cost_ratio", "memory_bound_speedup")
    assert all(getattr(first, name) is None for name in (*drafting, "efficiency", "draft_overhead"))


def test_an_engine_that_drafted_nothing_has_no_cost(clock):
    (comparison,) = run(clock, FakeEngine(clock), FakeEngine(clock), [task("t", "a")])
    _, second = rows_of([comparison])
    assert second.cost_ratio is second.memory_bound_speedup is second.draft_overhead is None
    assert second.efficiency == 1 and comparison.advice() is None


def test_the_advice_is_on_the_batch_size_that_gains_least(clock):
    texts = "abcdefghijklmnopqrstuvwxyz" * 2
    good = run(clock, FakeEngine(clock), FakeEngine(clock, drafted=4), [task("t", texts)])
    assert (
        advice_on(good) == "100% of the drafts were accepted, more than 80%: lengthen num_speculative_tokens"
    )
    slow = FakeEngine(clock, drafted=4, propose=9.0)
    bad = run(clock, FakeEngine(clock), slow, [task("t", texts)], batch_sizes=(2,))
    assert advice_on([*good, *bad]).startswith(
        "speculation loses time (0.50x the speed of plain decoding; 100% of the drafts were accepted)"
    )


@pytest.mark.parametrize("adaptive", [False, True])
def test_the_advice_knows_who_chooses_the_length(clock, adaptive):
    slow = FakeEngine(clock, drafted=4, propose=9.0, adaptive=adaptive)
    lost = run(clock, FakeEngine(clock), slow, [task("t", "abcdefghijklmnopqrstuvwxyz" * 2)])
    assert ("shorten num_speculative_tokens" in advice_on(lost)) is not adaptive


def test_prompts_that_leave_no_room_are_left_out(caplog):
    tasks = [task("s", ["ab", "abcd"]), task("t", ["abcde"])]
    (kept,) = fitting(tasks, Characters(), 3, chat=True)
    assert kept.name == "s" and [prompt.text for prompt in kept.prompts] == ["ab"]
    assert "2 of 3 prompts are longer than 3 tokens" in caplog.text
    with pytest.raises(ConfigError, match="all 3 prompts are longer than the 1 tokens"):
        fitting(tasks, Characters(), 1, chat=True)


def test_warm_up_is_short_and_counts_nowhere(clock):
    plain = FakeEngine(clock)
    (comparison,) = run(clock, plain, FakeEngine(clock), [task("t", "a")], warmup_tokens=3)
    assert [params.max_tokens for _, _, params in plain.log] == [3, 6]
    assert comparison.plain.counters.generated == 6 and comparison.plain.seconds == 5


def test_engines_take_turns_and_each_is_first_as_often(clock):
    log = []
    plain, speculative = FakeEngine(clock, log=log), FakeEngine(clock, log=log)
    run(clock, plain, speculative, [task("t", "abcd")], repeats=2)
    measured = [(engine is plain, texts[0]) for engine, texts, _ in log[2:]]
    pairs = [measured[i : i + 2] for i in range(0, len(measured), 2)]
    assert all(a[0] != b[0] and a[1] == b[1] for a, b in pairs)
    assert sum(pair[0][0] for pair in pairs) == len(pairs) / 2 == 4


@pytest.mark.parametrize(
    ("size", "groups"),
    [(1, ["a", "b", "c"]), (2, ["ab", "ca"]), (3, ["abc"]), (8, ["abcabcab"])],
)
def test_batches_are_always_full(clock, size, groups):
    plain = FakeEngine(clock)
    (comparison,) = run(clock, plain, FakeEngine(clock), [task("t", "abc")], batch_sizes=(size,))
    assert ["".join(texts) for _, texts, _ in plain.log[1:]] == groups
    assert [chr(o.outputs[0].token_ids[0]) for o in comparison.plain.outputs] == ["a", "b", "c"]


def test_each_task_and_batch_size_is_a_comparison_and_progress_is_told(clock):
    tasks, settings = [task("s", "abc"), task("t", "d")], Settings(batch_sizes=(1, 2), repeats=3)
    advanced = []
    found = compare(
        FakeEngine(clock),
        FakeEngine(clock),
        "m",
        tasks,
        GREEDY,
        settings,
        advance=lambda: advanced.append(1),
        clock=lambda: clock.now,
    )
    assert [(c.plain.task, c.plain.batch_size) for c in found] == [("s", 1), ("t", 1), ("s", 2), ("t", 2)]
    assert len(advanced) == count_runs(tasks, settings) == 2 * 3 * (4 + 3)


def test_a_different_token_is_found_and_placed(clock):
    tasks = [task("s", "ab"), task("t", "c")]
    found = run(clock, FakeEngine(clock), FakeEngine(clock, drafted=2, wrong="b"), tasks, repeats=2)
    assert [c.identical for c in found] == [False, True]
    (mismatch,) = found[0].speculative.mismatches
    assert (mismatch.prompt, mismatch.position, mismatch.plain, mismatch.other) == ("s1", 2, ord("b"), 1)
    assert "prompt s1, batch size 1: output token 2 is 1, without speculation 98" in str(mismatch)
    assert [row.identical for row in rows_of(overall(found))] == [True, False]


def test_an_output_that_ends_early_is_a_difference(clock):
    class Short(FakeEngine):
        def generate(self, prompts, params, *, use_tqdm):
            outputs = super().generate(prompts, params, use_tqdm=use_tqdm)
            del outputs[0].outputs[0].token_ids[4:]
            return outputs

    (comparison,) = run(clock, FakeEngine(clock), Short(clock, drafted=1), [task("t", "a")])
    (mismatch,) = comparison.speculative.mismatches
    assert (mismatch.position, mismatch.plain, mismatch.other) == (4, ord("a"), None)
    assert "is missing" in str(mismatch)


def test_prompts_are_put_into_the_chat_template_if_there_is_one():
    tokenizer = Characters()
    assert encode(tokenizer, "hi") == [0, ord("h"), ord("i")]
    tokenizer.chat_template = "there is one"
    assert "".join(map(chr, encode(tokenizer, "hi"))) == "<user>hi"
    assert encode(tokenizer, "hi", chat=False) == [0, ord("h"), ord("i")]


def test_what_was_said_before_a_prompt_stands_in_front_of_it():
    tokenizer = Characters()
    said = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
    prompt = Prompt(id="1", text="c", before=said)
    assert "".join(map(chr, encode(tokenizer, prompt)[1:])) == "a\n\nb\n\nc"
    tokenizer.chat_template = "there is one"
    assert "".join(map(chr, encode(tokenizer, prompt))) == "<user>a<assistant>b<user>c"


def test_all_tasks_together_add_counts_and_times(clock):
    found = run(clock, FakeEngine(clock), FakeEngine(clock, drafted=4), [task("s", "ab"), task("t", "c")])
    (total,) = overall(found)
    assert (total.plain.task, total.plain.counters.generated, total.plain.seconds) == ("all", 18, 15)
    assert total.speculative.counters.acceptance_length == 5
    assert overall(found[:1]) == []


@pytest.mark.parametrize("rule", ["synthetic", "typical"])
def test_a_lossy_rule_is_marked_in_rows_and_tables(clock, rule):
    speculative = FakeEngine(clock, drafted=2, labels={"acceptance": rule})
    found = run(clock, FakeEngine(clock), speculative, [task("t", "a"), task("u", "b")])
    rows = rows_of([*found, *overall(found)])
    assert [row.lossy for row in rows] == [None, rule] * 3
    assert [row.synthetic for row in rows] == [False, rule == "synthetic"] * 3
    methods = table_of(found, "title").columns[1].cells
    assert [cell.endswith(f", {rule}") for cell in methods] == [False, True] * 3
    assert all(cell.endswith(f", {rule}") for cell in cost_table_of(found, "title").columns[0].cells)
    real = run(clock, FakeEngine(clock), FakeEngine(clock, drafted=2), [task("t", "a")])
    assert not any(row.synthetic or row.lossy for row in rows_of(real))


def test_the_json_object_has_the_promised_shape(clock):
    found = run(clock, FakeEngine(clock), FakeEngine(clock, drafted=2), [task("t", "a")])
    report = as_json({"device": "cpu"}, rows_of(found), "a line")
    assert report["environment"] == {"device": "cpu"} and report["advice"] == "a line"
    assert [list(row) for row in report["rows"]] == [
        [
            "task",
            "method",
            "batch_size",
            "tokens_per_s",
            "speedup",
            "decode_speedup",
            "acceptance_length",
            "tokens_per_target_step",
            "acceptance_per_position",
            "identical",
            "synthetic",
            "lossy",
            "acceptance_rate",
            "drafts_per_target_step",
            "cost_ratio",
            "memory_bound_speedup",
            "efficiency",
            "draft_overhead",
            "seconds",
            "target_seconds",
            "verify_seconds",
            "propose_seconds",
            "other_seconds",
        ]
    ] * 2


def test_counters_of_an_engine_that_never_drafted_have_no_acceptance():
    nothing = Counters()
    assert nothing.acceptance_length is None
    assert nothing.tokens_per_target_step is None
    assert nothing.acceptance_per_position is None


def test_acceptance_counts_the_bonus_token_and_only_steps_that_drafted():
    # Five steps, of which four drafted and accepted 0, 2, 4 and 1 of four.
    counters = Counters(
        generated=13,
        decode_tokens=12,
        decode_steps=5,
        drafts=4,
        draft_tokens=16,
        accepted=7,
        accepted_per_position=(3, 2, 1, 1),
    )
    assert counters.acceptance_length == 2.75
    assert counters.tokens_per_target_step == 2.4
    assert counters.acceptance_per_position == (0.75, 0.5, 0.25, 0.25)
    assert (counters + counters) - counters == counters
