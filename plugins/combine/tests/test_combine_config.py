"""What is wrong with a combination is told before any weight is read, by the path of the child."""

from __future__ import annotations

import json
import subprocess
import sys

import attrs
import pytest
from specdec_combine.plugin import specdecode_proposers
from specdecode.contract import ConfigError, Place, Probs, TargetInfo, Unsupported
from specdecode.plugins import PluginManager, discovery, prepare

NGRAM = {"method": "ngram", "num_speculative_tokens": 4}


@pytest.fixture(scope="module")
def info(target):
    config = json.loads((target / "config.json").read_text("utf-8"))
    return TargetInfo(
        path=str(target), architecture="LlamaForCausalLM", vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"], num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"], num_kv_heads=config["num_key_value_heads"],
        head_dim=config["hidden_size"] // config["num_attention_heads"], max_model_len=256,
        dtype="float32", device="cpu",
    )  # fmt: skip


@pytest.fixture
def needs_of(manager, info):
    return lambda config: prepare(manager, config, info).needs


def faults(needs_of, config):
    with pytest.raises(ConfigError) as refused:
        needs_of(config)
    return list(refused.value.faults)


def test_the_faults_of_all_children_at_once_by_their_path(needs_of):
    found = faults(
        needs_of,
        {
            "method": "cascade",
            "proposers": [
                {"method": "ngram", "num_speculative_tokens": 0},
                {"method": "extend", "proposers": [NGRAM, {**NGRAM, "prompt_lookup_maxx": 3}]},
                {"method": 7},
                {},
                {"method": "ngram", "num_speculative_tokens": 2, "adaptive": True},
            ],
        },
    )
    root = "speculative_config.proposers"
    assert found[0] == f"{root}[0].num_speculative_tokens must be between 1 and 1024, got 0"
    assert found[1].startswith(f"{root}[1].proposers[1].prompt_lookup_maxx is not a known key; did you mean")
    assert found[2] == f"{root}[2].method must be a string, got 7"
    assert found[3].startswith(f"{root}[3] names neither method nor model; set {root}[3].method to one of")
    assert found[4].startswith(f"{root}[4].adaptive is not a known key")
    assert len(found) == 5


def test_a_child_that_is_not_installed_is_told_with_its_pip_line(info, monkeypatch):
    found = [candidate for candidate in discovery.discover() if candidate.dist != "specdec-eagle"]
    monkeypatch.setattr("specdecode.plugins.manager.discover", lambda: found)
    manager = PluginManager()
    with pytest.raises(ConfigError) as refused:
        prepare(manager, {"method": "cascade", "proposers": [NGRAM, {"method": "eagle3"}]}, info)
    assert str(refused.value).startswith(
        "speculative_config.proposers[1].method 'eagle3' is not installed: pip install specdec-eagle."
    )


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"method": "cascade", "proposers": [NGRAM]}, ".proposers must be a list of at least 2"),
        ({"method": "cascade"}, "speculative_config.proposers is required"),
        ({"method": "cascade", "proposers": [NGRAM, NGRAM], "min_score": -1}, "min_score must be at least 0"),
        ({"method": "extend", "proposers": [NGRAM, 3]}, "speculative_config.proposers[1] must be"),
        ({"method": "auto"}, "num_speculative_tokens is required where proposers is left out"),
        ({"method": "auto", "proposers": [NGRAM], "num_speculative_tokens": 2}, "no effect beside proposers"),
        ({"method": "auto", "proposers": [NGRAM], "exploration": 0.6}, "must be between 0 and 0.5"),
        ({"method": "auto", "proposers": [NGRAM], "trial_steps": 7}, "trial_steps must be at least 8"),
    ],
)  # fmt: skip
def test_bad_values(needs_of, config, text):
    (fault,) = faults(needs_of, config)
    assert text in fault


def test_what_cannot_work_together_is_refused(needs_of, eagle):
    with pytest.raises(Unsupported, match=r"min_score=1 would keep proposers\[0\] from ever drafting"):
        needs_of({"method": "cascade", "proposers": [eagle, NGRAM], "min_score": 1})
    with pytest.raises(Unsupported, match=r"the method of proposers\[1\] cannot go on from drafts"):
        needs_of({"method": "extend", "proposers": [NGRAM, eagle]})
    tree = {**eagle, "tree_top_k": 2}
    with pytest.raises(Unsupported, match=r"proposers\[0\] drafts trees"):
        needs_of({"method": "extend", "proposers": [tree, NGRAM]})


def test_needs(needs_of, eagle):
    on_device = {**NGRAM, "method": "lookup-on-device"}
    cascade = needs_of({"method": "cascade", "proposers": [on_device, eagle]})
    assert (cascade.place, cascade.graphs, cascade.width, cascade.depth) == (Place.DEVICE, True, 4, 4)
    assert needs_of({"method": "cascade", "proposers": [NGRAM, eagle]}).place is Place.HOST
    extend = needs_of({"method": "extend", "proposers": [eagle, on_device]})
    assert (extend.place, extend.graphs, extend.width, extend.depth) == (Place.DEVICE, True, 7, 7)
    assert not extend.continues and not needs_of({"method": "auto", "proposers": [on_device]}).graphs
    lookups = {"method": "extend", "proposers": [NGRAM, NGRAM]}
    assert needs_of(lookups).continues
    assert needs_of({"method": "extend", "proposers": [eagle, lookups]}).width == 11


@pytest.mark.parametrize(
    ("config", "probs"),
    [
        # What sees tokens alone looks them up, and who drafts does not depend on a draw.
        (lambda eagle: {"method": "cascade", "proposers": [NGRAM, eagle]}, Probs.FULL),
        (lambda eagle: {"method": "extend", "proposers": [eagle, NGRAM]}, Probs.FULL),
        (lambda eagle: {"method": "auto", "proposers": [eagle, NGRAM]}, Probs.FULL),
        # A grown tree draws and tells no laws: nor may the one that is asked when it is not sure.
        (lambda eagle: {"method": "cascade", "proposers": [{**eagle, "tree_top_k": 2}, eagle]}, Probs.NONE),
        (lambda eagle: {"method": "cascade", "proposers": [eagle, {**eagle, "tree_top_k": 2}]}, Probs.FULL),
        (lambda eagle: {"method": "cascade", "proposers": [NGRAM, NGRAM]}, Probs.NONE),
    ],
)
def test_laws_are_told_where_the_choice_does_not_depend_on_draws(needs_of, eagle, config, probs):
    assert needs_of({**config(eagle), "rejection_sample_method": "standard"}).probs is probs


def test_what_a_childs_method_says_of_its_keys_bears_the_childs_path(manager, info, eagle):
    other = attrs.evolve(info, hidden_size=2 * info.hidden_size)
    with pytest.raises(ConfigError, match=r"^speculative_config\.proposers\[1\]\.model: .* hidden size"):
        prepare(manager, {"method": "cascade", "proposers": [NGRAM, eagle]}, other)


def test_children_without_a_method_are_recognised(needs_of, eagle):
    unnamed = {key: value for key, value in eagle.items() if key != "method"}
    by_name, by_weights = (
        needs_of({"method": "cascade", "proposers": [NGRAM, head]}) for head in (eagle, unnamed)
    )
    assert by_name == by_weights and by_weights.kv


def test_auto_finds_what_can_do_without_a_checkpoint(info):
    manager = PluginManager(allow=["combine", "ngram", "eagle", "draft"])
    found = prepare(manager, {"method": "auto", "num_speculative_tokens": 3}, info)
    assert [child.width for child in found.needs.children] == [3]  # prompt lookup, and no combination
    alone = PluginManager(allow=["combine", "eagle"])
    with pytest.raises(ConfigError, match="no installed method drafts for this target without a checkpoint"):
        prepare(alone, {"method": "auto", "num_speculative_tokens": 3}, info)


def test_the_plugin_imports_nothing_heavy():
    load = "import sys, specdec_combine.plugin as plugin; list(plugin.specdecode_proposers())"
    code = f"{load}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    assert [spec.name for spec in specdecode_proposers()] == ["cascade", "extend", "auto"]
