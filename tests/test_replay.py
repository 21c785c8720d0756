"""Replays of recorded texts: they count what the engine counts."""

from __future__ import annotations

import json

import pytest
from specdecode import LLM, SamplingParams
from specdecode.cli.app import app
from specdecode.contract import Drafts, Needs, Place, Proposer, Shape, StepView, Tokens, Unsupported
from specdecode.testing.dry import DryEngine, Recorded
from specdecode.testing.tiny import tiny_checkpoint
from typer.testing import CliRunner

METHOD = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}


def value(metrics, name):
    return next(m for m in metrics if m.name == f"vllm:{name}").value


@pytest.fixture(scope="module")
def spoken(tmp_path_factory):
    """Prompts, the answers of a model that runs in circles, and what ngram gave there."""
    model = str(tiny_checkpoint(tmp_path_factory.mktemp("tiny"), vocab_size=24, zero_outputs=True))
    llm = LLM(model=model, skip_tokenizer_init=True, device="cpu", dtype="float32", speculative_config=METHOD)
    prompts = [[7, 3, 7, 3, 7], [11, 12, 13], [5, 9] * 6]
    outputs = llm.generate(
        [{"prompt_token_ids": ids} for ids in prompts], SamplingParams(max_tokens=33, ignore_eos=True)
    )
    return list(zip(prompts, (o.outputs[0].token_ids for o in outputs), strict=True)), llm.get_metrics()


@pytest.fixture
def on_file(spoken, tmp_path):
    path = tmp_path / "spoken.jsonl"
    lines = [json.dumps({"prompt_token_ids": p, "token_ids": list(a)}) for p, a in spoken[0]]
    path.write_text("\n".join(lines))
    return path


def run(*arguments):
    return CliRunner().invoke(app, ["replay", *map(str, arguments)], env={"COLUMNS": "160"})


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_replay_counts_what_the_engine_counted(spoken, on_file, batch_size):
    texts, metrics = spoken
    told = run(on_file, "--spec-config", json.dumps(METHOD), "--batch-size", batch_size, "--json")
    assert told.exit_code == 0, told.output
    (found,) = json.loads(told.stdout)["methods"]
    assert found["drafts"] == value(metrics, "spec_decode_num_drafts") > 0
    assert found["drafted"] == value(metrics, "spec_decode_num_draft_tokens")
    assert found["accepted"] == value(metrics, "spec_decode_num_accepted_tokens") > 0
    per_place = next(m for m in metrics if m.name == "vllm:spec_decode_num_accepted_tokens_per_pos").values
    assert found["accepted_at"] == [count for count in per_place if count]
    assert found["tokens"] == sum(len(answer) - 1 for _, answer in texts)  # the first comes with the prompt


def test_without_a_configuration_every_method_that_reads_tokens_is_tried(on_file):
    told = run(on_file)
    assert told.exit_code == 0, told.output
    assert all(f"ngram k={length}" in told.output for length in (3, 5, 10))


def test_a_plot_is_drawn(on_file, tmp_path):
    pytest.importorskip("matplotlib")
    assert run(on_file, "--plot", tmp_path / "plot.svg").exit_code == 0
    assert (
        "tokens a step" in (tmp_path / "plot.svg").read_text()
        or (tmp_path / "plot.svg").stat().st_size > 5000
    )


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ('{"text": "x"}', "entry 1 is none of"),
        ('{"prompt": "x", "answer": "y"}', "add --tokenizer"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "holds no answer"),
        ("nonsense", "not JSON"),
    ],
)
def test_what_cannot_be_replayed_is_told(tmp_path, content, told):
    path = tmp_path / "file.jsonl"
    path.write_text(content)
    result = run(path)
    assert result.exit_code == 1 and told in " ".join(result.output.split())


def test_a_configuration_that_is_wrong_is_an_error(on_file):
    result = run(on_file, "--spec-config", '{"method": "ngram", "num_speculative_tokens": 0}')
    assert result.exit_code == 1 and "num_speculative_tokens" in result.output


class Forked(Proposer):
    """Two children of the last token, the second of which is right and has a child of its own."""

    def __init__(self, answer):
        self.answer, self.calls = answer, []

    def on_add(self, request):
        self.calls.append(("add", request.id, request.namespace))

    def on_commit(self, commits):
        self.calls += [("commit", c.id, tuple(c.token_ids), c.accepted, c.prefill) for c in commits]

    def on_finish(self, request_id, reason):
        self.calls.append(("finish", request_id, reason))

    def propose(self, step: StepView, out: Drafts):
        at = int(step.committed_len[0]) - 1  # of a prompt of one token
        if step.budget[0]:
            follows = [*self.answer, 0, 0][at : at + 2]
            out.ids[0, :3], out.parents[0, :3], out.lens[0] = [19, *follows], [-1, -1, 1], 3


def test_trees_lifecycle_and_room():
    answer = [1, 2, 3, 4, 5]
    proposer = Forked(answer)
    needs = Needs(width=3, depth=2, shape=Shape.TREE, tokens=Tokens.HISTORY)
    result = DryEngine(proposer, needs, vocab_size=20).replay(
        [Recorded(prompt=[0], answer=answer, namespace="n")]
    )
    assert proposer.calls == [
        ("add", "replay-1", "n"),
        ("commit", "replay-1", (1,), 0, True),
        ("commit", "replay-1", (2, 3, 4), 2, False),
        ("commit", "replay-1", (5,), 0, False),
        ("finish", "replay-1", "length"),
    ]
    assert (result.verifications, result.accepted_at, result.drafted) == (2, [1, 1], 3)


def test_what_needs_a_model_is_refused():
    for needs in (Needs(width=1, depth=1, place=Place.DEVICE), Needs(width=1, depth=1, modules={"embed"})):
        with pytest.raises(Unsupported, match="cannot be replayed without its target"):
            DryEngine(Forked([]), needs, vocab_size=9)


def test_it_wants_no_torch():
    import subprocess
    import sys

    code = "import sys, specdecode.testing.dry; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
