"""H21: a bad ``num_speculative_tokens`` is named with its value and range, before any weight is read.

Checkpoints that declare their count belong to methods that come later: here a method of the test's
own reads it, as theirs will, and is told of a ``k`` that its three heads cannot give.
"""

from __future__ import annotations

import json

import attrs
import pytest

#: Methods that take a count, and what else their configuration wants.
METHODS = {
    "ngram": {},
    "scripted-oracle": {},
    "scripted-liar": {},
    "scripted-ragged": {},
    "scripted-oracle-tree": {},
    "scripted-self-draft": {},
    "scripted-small-draft": {"model": "draft"},
    "scripted-eagle": {"fanout": 2},
    "scripted-faulty": {"fault": "raises"},
}
MISSING = object()


@pytest.fixture(scope="module")
def weightless(tmp_path_factory):
    """A checkpoint whose weights are gone: whoever reads them before all is checked fails otherwise."""
    from specdecode.testing.tiny import tiny_checkpoint

    path = tiny_checkpoint(tmp_path_factory.mktemp("weightless"))
    (path / "model.safetensors").unlink()
    return str(path)


@pytest.mark.parametrize(
    "value",
    [MISSING, None, 0, -1, "3", 2.5, True, 10**6],
    ids=lambda value: "missing" if value is MISSING else repr(value),
)
@pytest.mark.parametrize("method", METHODS)
def test_h21_bad_values(faults, weightless, method, value):
    config = {"method": method, **METHODS[method]}
    if value is not MISSING:
        config["num_speculative_tokens"] = value
    with pytest.raises(ValueError) as caught:
        faults.engine(config, model=weightless, recorded=False)
    message = str(caught.value)
    assert "speculative_config.num_speculative_tokens" in message
    if value is MISSING:
        assert "required" in message and "1 to 1024" in message
    elif isinstance(value, int) and not isinstance(value, bool):
        assert "between 1 and 1024" in message and repr(value) in message
    else:
        assert "integer" in message and repr(value) in message and "1 to 1024" in message
    assert "-1024" not in message and "max_num_scheduled" not in message  # nothing derived


def test_h21_bounds_are_served(faults, same):
    """The smallest and the largest count: the drafts are cut to what a step and the context hold."""
    ask = faults.ask([60, 61, 62] * 4, max_tokens=12, ignore_eos=True, allowed_token_ids=[60, 61])
    for count in (1, 1024):
        engine = faults.engine(
            {"method": "ngram", "num_speculative_tokens": count}, max_num_batched_tokens=32, max_num_seqs=4
        )
        same(engine.generate([ask]), faults.base([ask]), f"k={count}")
        assert engine.drafted > 0


def test_h21_a_fixed_tree_says_its_size(faults):
    tree = [[0], [1], [0, 0]]
    with pytest.raises(ValueError, match=r"num_speculative_tokens.*3 nodes"):
        faults.engine({"method": "scripted-eagle", "num_speculative_tokens": 4, "tree": tree}, recorded=False)


# -- a checkpoint that declares its count ---------------------------------------------------------
@pytest.fixture
def heads(lab, tmp_path):
    """A draft checkpoint of three heads, and a method that reads how many there are."""
    from safetensors.numpy import save_file
    from specdecode.contract import API, ConfigError, Needs, Proposer, ProposerSpec, option, within
    from specdecode.plugins import PluginManager, hookimpl

    @attrs.frozen(kw_only=True)
    class Config:
        model: str = option("the heads")
        num_speculative_tokens: int | None = option(
            "drafts a step; none: as many as heads", default=None, validator=within(1)
        )

    class Sevens(Proposer):
        def propose(self, step, out):
            counts = [min(pair) for pair in zip(step.budget.tolist(), step.room.tolist(), strict=True)]
            for row, count in enumerate(counts):
                out.ids[row, :count], out.lens[row] = 7, count

    def needs(config, context):
        declared = context.draft.config["n_predict"]
        count = config.num_speculative_tokens or declared
        if count > declared:
            raise ConfigError(
                f"speculative_config.num_speculative_tokens must be at most {declared}, the checkpoint's "
                f"heads, got {count}"
            )
        return Needs(width=count, depth=count)

    class Plugin:
        @hookimpl
        def specdecode_proposers(self):
            yield ProposerSpec(
                name="heads", summary="sevens", api=API, config=Config, needs=needs, build=lambda *_: Sevens()
            )

    import numpy as np

    save_file({"head.weight": np.zeros((2, 2), np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "heads", "n_predict": 3}))
    manager = PluginManager()
    manager.register(Plugin(), name="heads")

    def start(**fields):
        from specdecode import EngineArgs, LLMEngine

        config = {"method": "heads", "model": str(tmp_path), **fields}
        keywords = {"max_model_len": 64, "num_gpu_blocks_override": 16, "device": lab.device.type}
        return LLMEngine(EngineArgs(str(lab.target), speculative_config=config, **keywords), manager)

    return start


@pytest.mark.parametrize(("fields", "count"), [({}, 3), ({"num_speculative_tokens": 2}, 2)])
def test_h21_the_checkpoints_count(heads, faults, fields, count):
    ask = faults.ask([60, 61, 62], max_tokens=8, ignore_eos=True)
    engine = heads(**fields)
    engine.add_request("a", {"prompt_token_ids": ask.prompt}, ask.params)
    for _ in range(3):
        engine.step()
    values = {metric.name: metric.value for metric in engine.get_metrics()}
    assert values["vllm:spec_decode_num_draft_tokens"] == count * values["vllm:spec_decode_num_drafts"] > 0
    assert len(values["vllm:spec_decode_num_accepted_tokens_per_pos"]) == count
    engine.shutdown()


def test_h21_more_than_the_checkpoint_has(heads):
    with pytest.raises(ValueError, match=r"num_speculative_tokens must be at most 3.*got 4"):
        heads(num_speculative_tokens=4)
