"""The kit itself: its three doors, what they report, and that it quotes the contract."""

from __future__ import annotations

import json
import re
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch
from specdecode.cli.app import app
from specdecode.contract import ConfigError, Needs, Probs
from specdecode.plugins import manager as manager_module
from specdecode.testing import scripted
from specdecode.testing.conformance import Case, Outcome, all_checks, check_proposer, toy
from specdecode.testing.conformance.checks import Broken, Check, Group, NotApplicable, Note
from specdecode.testing.conformance.footprint import size_bytes, strings
from specdecode.testing.conformance.groups import drafts
from specdecode.testing.conformance.probe import Log, RowRecord
from specdecode.testing.conformance.pytest_door import BoundCheck, parametrize_with_checks
from specdecode.testing.conformance.running import run_check
from specdecode.testing.conformance.subject import Subject
from specdecode.testing.conformance.syncs import SyncWatch
from typer.testing import CliRunner

scripted.install()

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [ROOT / "docs/contract.md", ROOT / "docs/plugins.md", ROOT / "docs/architecture.md"]
SOURCES += sorted((ROOT / "core/src/specdecode/contract").glob("*.py"))
SOURCES += [ROOT / "core/src/specdecode/plugins/preparation.py"]


def oracle(**case):
    return Case(
        method="scripted-oracle",
        config=lambda toy: {"num_speculative_tokens": 4, "texts": toy.texts},
        **case,
    )


@pytest.fixture(scope="module")
def subject():
    return Subject(oracle())


def plain(text):
    """Words only: without marks of code, comments and line breaks."""
    return re.sub(r"\s+", " ", re.sub(r"``?|#:|\n\s*#", " ", text))


# -- the list of checks ----------------------------------------------------------------------------
@pytest.mark.parametrize("check", all_checks(), ids=lambda check: check.id)
def test_promises_are_quoted(check):
    assert any(plain(check.promise) in plain(source.read_text("utf-8")) for source in SOURCES)


def test_ids_are_stable():
    """Expected failures of plugins name them; one is never renamed, only added."""
    assert {check.id for check in all_checks()} == {
        "packaging.light-import", "packaging.bounded-core-range", "packaging.entry-name",
        "packaging.resolved-again", "lossless.law", "cost.told",
        "config.unknown-key-refused", "config.faults-together", "config.round-trip", "config.frozen",
        "config.documented", "needs.pure", "needs.torch-free", "needs.refuses-with-a-reason",
        "drafts.in-vocabulary", "drafts.within-budget", "drafts.within-room", "drafts.parents-ordered",
        "drafts.chain", "drafts.scores", "drafts.probabilities", "drafts.place-honoured",
        "drafts.buffers-written", "drafts.buffers-not-kept", "drafts.view-not-written",
        "honesty.declares-what-it-reads", "honesty.undeclared-not-used", "honesty.uses-what-it-declares",
        "lifecycle.any-order", "lifecycle.frees-everything", "lifecycle.close-twice", "lifecycle.metrics",
        "lifecycle.known-hooks", "state.through-preemptions",
        "isolation.neighbours", "isolation.forgets-requests", "isolation.namespaces",
        "state.as-stateless", "state.after-failures", "lossless.greedy", "lossless.seeded",
            "lossless.new-weights",
        "failure.costs-drafts-only", "failure.recovers", "failure.frees-unasked",
        "graphs.static-steps", "graphs.fixed-addresses", "graphs.copies-nothing", "graphs.never-waits",
        "graphs.replays",
    }  # fmt: skip


def test_every_check_is_documented():
    page = (ROOT / "docs/conformance.md").read_text("utf-8")
    table = page[page.index("## Checks") : page.index("## Adding a group")]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert set(re.findall(r"`([^`]+)`", " ".join(rows))) == {check.id for check in all_checks()}


# -- one check -------------------------------------------------------------------------------------
def check_that(run, **fields):
    return Check(id="group.name", promise="a promise", run=run, **fields)


def broken(subject):
    raise Broken("seen")


def absent(subject):
    raise NotApplicable("nothing here")


@pytest.mark.parametrize(
    ("check", "outcome", "detail"),
    [
        (check_that(lambda subject: None), Outcome.PASSED, ""),
        (check_that(lambda subject: "look"), Outcome.WARNED, "look"),
        (check_that(lambda subject: Note("3 ms")), Outcome.PASSED, "3 ms"),
        (check_that(broken), Outcome.FAILED, "seen"),
        (check_that(lambda subject: {}["key"]), Outcome.FAILED, "KeyError: 'key'"),
        (check_that(absent), Outcome.NOT_APPLICABLE, "nothing here"),
        (check_that(broken, applies=lambda needs: "no KV"), Outcome.NOT_APPLICABLE, "no KV"),
        (check_that(broken, api=99), Outcome.NOT_APPLICABLE, "promised since contract api 99"),
    ],
)
def test_outcomes(subject, check, outcome, detail):
    result = run_check(check, subject, {})
    assert (result.outcome, result.detail) == (outcome, detail)
    assert result.group == "group"


def test_expected_failures_are_strict(subject):
    expected = {"group.name": "known"}
    failing = run_check(check_that(broken), subject, expected)
    assert (failing.outcome, failing.detail) == (Outcome.EXPECTED_FAILURE, "known (seen)")
    assert not failing.outcome.fault
    passing = run_check(check_that(lambda subject: None), subject, expected)
    assert passing.outcome is Outcome.UNEXPECTED_PASS and passing.outcome.fault
    assert run_check(check_that(absent), subject, expected).outcome is Outcome.NOT_APPLICABLE


def test_a_group_is_a_list_of_checks_that_a_decorator_adds_to():
    group = Group("shape", order=1)

    @group.check("square", "all sides are equal", applies=lambda needs: "a circle")
    def square(subject):
        return None

    assert [(check.id, check.promise) for check in group.checks] == [("shape.square", "all sides are equal")]
    assert group.checks[0].applies(Needs(width=1, depth=1)) == "a circle"


def test_unknown_expected_failures_are_refused():
    with pytest.raises(ConfigError, match=r"drafts\.in-vocablary, which no check is"):
        check_proposer(
            "ngram", {"num_speculative_tokens": 4}, expected_failures={"drafts.in-vocablary": "typo"}
        )
    with pytest.raises(ConfigError, match="which no check is"):
        parametrize_with_checks([oracle(expected_failures={"nope": ""})])


def test_a_config_that_the_method_refuses_is_the_callers_error():
    with pytest.raises(ConfigError, match=r"speculative_config\.num_speculative_tokens"):
        check_proposer("ngram", {"num_speculative_tokens": 0})


def test_probabilities(subject):
    """No proposer declares them under the default rule; the check on rows of its own."""
    row = RowRecord(
        call=1, request_id="a/0#0", history=(1,), params=None, budget=2, room=2, len=2, ids=(1, 0),
        parents=(-1, 0), score=(0.0, 0.0), resumed=False, probs=np.array([[0.5, 0.5], [0.25, 0.75]]),
    )  # fmt: skip

    def tried(*probs):
        scene = type("Scene", (), {"log": Log(rows=[attrs.evolve(row, probs=np.array(probs))])})
        return drafts.probabilities(type("Subject", (), {"ordinary": scene, "stress": scene}))

    assert tried([0.5, 0.5], [0.25, 0.75]) is None
    with pytest.raises(Broken, match=r"those of node 1 sum to 0\.7"):
        tried([0.5, 0.5], [0.25, 0.5])
    with pytest.raises(Broken, match="node 0 drafted 1, to which it gives probability 0"):
        tried([1.0, 0.0], [0.25, 0.75])
    (check,) = (check for check in all_checks() if check.id == "drafts.probabilities")
    assert check.applies(subject.needs) and not check.applies(Needs(width=1, depth=1, probs=Probs.FULL))


def sampler(**config):
    return Case(
        method="scripted-sampler",
        config=lambda toy: {"num_speculative_tokens": 3, "near": 0.5, "spread": 1.0, **config},
    )


@pytest.mark.parametrize(
    ("case", "outcome", "told"),
    [
        (sampler(rejection_sample_method="standard"), Outcome.PASSED, ""),
        (sampler(rejection_sample_method="standard", lie="argmax"), Outcome.FAILED, "wrong law"),
        (sampler(), Outcome.NOT_APPLICABLE, "tokens are compared, not weighed"),
        (
            attrs.evolve(sampler(), config={"num_speculative_tokens": 3, "rejection_sample_method": "block"}),
            Outcome.NOT_APPLICABLE,
            "give config as a function",
        ),
    ],
    ids=["true", "argmax", "invariant", "one-target"],
)
def test_the_law_of_what_comes_out(case, outcome, told):
    """A drafter that says its best token was drawn bends the law of what is accepted."""
    (check,) = (check for check in all_checks() if check.id == "lossless.law")
    result = run_check(check, Subject(case), {})
    assert result.outcome is outcome and told in result.detail, result


def test_costs_are_told(subject):
    (check,) = (check for check in all_checks() if check.id == "cost.told")
    result = run_check(check, subject, {})
    assert result.outcome is Outcome.PASSED
    assert re.match(r"propose takes [\d.]+ ms a call of [\d.]+ rows .* bytes held", result.detail)


# -- the runs --------------------------------------------------------------------------------------
def test_the_runs_are_what_they_say(subject):
    """Chunks, prefix hits, preemptions, rows without a budget, and failures do happen."""
    assert subject.stress.log.preemptions > 0 and subject.ordinary.log.preemptions == 0
    for scene in (subject.ordinary, subject.stress, subject.failing):
        assert set(scene.outputs) == {ask.key for ask in scene.asks}
        assert scene.log.drafted and any(not row.budget for row in scene.log.rows)
    assert subject.failing.log.calls > len({row.call for row in subject.failing.log.rows})


def test_the_texts_are_the_targets_own():
    made = toy()
    for ask, text in zip(made.asks, made.texts, strict=True):
        output = made.outputs([ask])[ask.key]
        assert text[: len(ask.prompt) + len(output)] == (*ask.prompt, *output)


# -- what the probe sees ---------------------------------------------------------------------------
WAITS = {
    "item": lambda tensor: tensor[0].item(),
    "tolist": lambda tensor: tensor.tolist(),
    "int": lambda tensor: int(tensor[0]),
    "float": lambda tensor: float(tensor[0]),
    "bool": lambda tensor: bool(tensor[0]),
    "index": lambda tensor: [0, 1, 2][tensor[0]],
    "numpy": lambda tensor: tensor.numpy(),
    "asarray": lambda tensor: np.asarray(tensor),
    "cpu": lambda tensor: tensor.cpu(),
    "nonzero": lambda tensor: tensor.nonzero(),
    "where": lambda tensor: torch.where(tensor > 0),
    "mask": lambda tensor: tensor[tensor > 0],
    "unique": lambda tensor: tensor.unique(),
    "equal": lambda tensor: torch.equal(tensor, tensor),
}

NO_WAITS = {
    "arithmetic": lambda tensor: (tensor + 1).clamp(max=2).sum(),
    "indexing": lambda tensor: tensor[tensor.argsort()],
    "choice": lambda tensor: torch.where(tensor > 0, tensor, 0),
    "fill": lambda tensor: tensor.masked_fill(tensor > 0, 0),
    "masked write": lambda tensor: tensor.clone().__setitem__(tensor > 0, 0),
    "rows": lambda tensor: list(tensor),
}


@pytest.mark.parametrize("name", [*WAITS, *NO_WAITS])
def test_waits_for_the_device_are_seen(name):
    seen = []
    with SyncWatch(seen.append):
        (WAITS | NO_WAITS)[name](torch.tensor([1, 0, 2]))
    assert bool(seen) is (name in WAITS), seen


COPIES = {
    "tensor": lambda tensor: torch.tensor([1, 2], device=tensor.device),
    "as_tensor": lambda tensor: tensor + torch.as_tensor(2),
    "read by list": lambda tensor: tensor[[0, 1]],
    "written by list": lambda tensor: tensor.clone().__setitem__([0, 1], 0),
    "read by array": lambda tensor: tensor[np.array([0, 1])],
}
NO_COPIES = {
    "made there": lambda tensor: torch.arange(3, device=tensor.device) + torch.zeros_like(tensor),
    "slice": lambda tensor: tensor[1:],
    "number": lambda tensor: tensor.clone().__setitem__(0, 5),
    "as_tensor of one": lambda tensor: torch.as_tensor(tensor),
}


@pytest.mark.parametrize("name", [*WAITS, *COPIES, *NO_WAITS, *NO_COPIES])
def test_copies_from_the_host_are_seen_where_asked_for(name):
    seen, unasked = [], []
    tensor = torch.tensor([1, 0, 2])
    every = WAITS | COPIES | NO_WAITS | NO_COPIES
    with SyncWatch(seen.append, copies=True):
        every[name](tensor)
    assert bool(seen) is (name in {**WAITS, **COPIES}), seen
    with SyncWatch(unasked.append):
        every[name](tensor)
    assert bool(unasked) is (name in WAITS), unasked


def test_waits_of_core_are_not_the_proposers():
    from specdecode.testing.laws import count

    seen = []
    with SyncWatch(seen.append):
        count(torch.tensor([1, 0, 2]), 3)  # converts to numpy
    assert not seen


def test_a_footprint_is_what_an_object_keeps_alive():
    class Holder:
        pass

    holder, numbers = Holder(), np.zeros(1000)
    empty = size_bytes(holder)
    holder.view = numbers[:1]
    assert size_bytes(holder) > empty + numbers.nbytes
    holder.view = None
    holder.tensor, holder.ask = torch.zeros(1000), lambda: numbers
    assert size_bytes(holder) > empty + numbers.nbytes + 4000
    holder.names = {"a": ["kept"]}
    assert {"a", "kept"} <= strings(holder)


# -- pytest ----------------------------------------------------------------------------------------
def bound(run, **case):
    return BoundCheck(check_that(run), oracle(**case), lambda: Subject(oracle()))


def test_pytest_passes_fails_and_skips():
    bound(lambda subject: None)()
    with pytest.raises(pytest.fail.Exception, match=r"group\.name \('a promise'\): seen"):
        bound(broken)()
    with pytest.raises(pytest.skip.Exception, match="not applicable: nothing here"):
        bound(absent)()
    with pytest.warns(UserWarning, match="look"):
        bound(lambda subject: "look")()


def test_pytest_knows_expected_failures():
    expected = {"group.name": "known"}
    with pytest.raises(pytest.xfail.Exception, match="known"):
        bound(broken, expected_failures=expected)()
    with pytest.raises(pytest.fail.Exception, match="expected to fail: known"):
        bound(lambda subject: None, expected_failures=expected)()


def test_pytest_gets_every_check_of_every_case():
    mark = parametrize_with_checks([("ngram", {}), oracle()])
    ids = [parameter.id for parameter in mark.args[1]]
    assert ids == [
        f"{name}-{check.id}" for name in ("ngram-0", "scripted-oracle-1") for check in all_checks()
    ]


# -- command line ----------------------------------------------------------------------------------
def run(*arguments):
    return CliRunner().invoke(app, ["plugins", "conform", *arguments])


def test_the_command_tells_all_and_ends_in_json():
    result = run("ngram", "--config", '{"prompt_lookup_min": 1}')
    assert result.exit_code == 0, result.output
    *lines, last = result.stdout.splitlines()
    told = json.loads(last)
    assert told["ok"] is True
    assert [entry["id"] for entry in told["results"]] == [check.id for check in all_checks()]
    assert told["header"]["method"] == "ngram" and told["header"]["core"] and told["header"]["version"]
    assert told["header"]["config"] == {"num_speculative_tokens": 4, "prompt_lookup_min": 1}
    assert told["header"]["needs"]["tokens"] == "history"
    table = "\n".join(lines)
    assert all(check.id in table for check in all_checks())
    assert "Needs declare neither kv nor taps" in table


def test_the_command_fails_with_the_method(monkeypatch):
    from specdecode.cli import plugins as command

    monkeypatch.setattr(command, "_manager", lambda no_plugin: manager_module.default_manager())
    config = {"fault": "closes-once", "num_speculative_tokens": 4}
    result = run("scripted-wrong", "--config", json.dumps(config))
    assert result.exit_code == 1
    told = json.loads(result.stdout.splitlines()[-1])
    assert told["ok"] is False
    failing = [entry["id"] for entry in told["results"] if entry["outcome"] == "failed"]
    assert failing == ["lifecycle.close-twice"]


def test_the_command_refuses_an_unknown_method():
    result = run("nobody")
    assert result.exit_code != 0
