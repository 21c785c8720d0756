"""Who provides a method; and if nobody does, or two do, what to type next."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import attrs
import pytest
from specdecode.contract import CheckpointInfo, ConfigError, Match, Needs, ProposerSpec
from specdecode.plugins import PluginError, PluginManager, Status, default_manager, hookimpl
from specdecode.plugins.hints import known_methods


def refusal(manager, method, **options):
    with pytest.raises(ConfigError) as raised:
        manager.resolve(method, **options)
    assert len(raised.value.faults) == 1
    return str(raised.value)


@attrs.frozen(kw_only=True)
class NoKeys:
    """A method without keys."""


def spec(name, recognize=lambda checkpoint: None):
    return ProposerSpec(
        name=name,
        summary="",
        api=1,
        config=NoKeys,
        needs=lambda config, ctx: Needs(width=1, depth=1),
        build=lambda config, ctx: None,
        recognize=recognize,
    )


class Plugin:
    """An in-process plugin with the given specs."""

    def __init__(self, *specs):
        self.specs = specs

    @hookimpl
    def specdecode_proposers(self):
        return self.specs


# -- by name -------------------------------------------------------------------------------------------
def test_an_unknown_method_lists_what_is_installed_and_what_is_close(good):
    message = refusal(PluginManager(allow=["good"]), "goood", field="speculative_config.method")
    assert message == (
        "speculative_config.method 'goood' is unknown: did you mean 'good'? Installed methods: good."
    )
    assert (
        refusal(PluginManager(allow=["good"]), "xyz") == "method 'xyz' is unknown. Installed methods: good."
    )


def test_a_known_method_that_is_not_installed_gets_the_pip_line(good):
    for method, dist in known_methods().items():
        message = refusal(PluginManager(allow=["good"], disabled=[]), method)
        if "blocked" not in message:  # it is installed here, and this manager may not load it
            assert f"method {method!r} is not installed: pip install {dist}." in message
            assert "Installed methods: good." in message
    known = next(iter(known_methods()))
    assert "pip install" in refusal(PluginManager(allow=["good"]), known[:-1] + "q")


def test_a_method_that_is_installed_and_known_is_suggested_once(good, monkeypatch):
    monkeypatch.setattr("specdecode.plugins.resolution.known_methods", lambda: {"good": "acme-good"})
    message = refusal(PluginManager(allow=["good"]), "goood")
    assert message == "method 'goood' is unknown: did you mean 'good'? Installed methods: good."


def test_hints_name_distributions_of_this_project():
    hints = known_methods()
    assert set(hints) == {
        "ngram", "draft_model", "eagle", "eagle3", "medusa", "mlp_speculator", "suffix", "mtp",
        "cascade", "extend", "auto",
    }  # fmt: skip
    assert all(dist.startswith("specdec-") for dist in hints.values())


def test_the_reason_of_the_family_that_would_have_it(good):
    good.add(
        "acme-broken", entries={"broken": "acme_broken"}, files={"acme_broken.py": "import nothing_here"}
    )
    good.add_plugin("acme-old", methods=["old", "older"], requires=["specdec-core>=7"])
    manager = PluginManager(disabled=["acme-good"])
    assert refusal(manager, "broken") == (
        "method 'broken' cannot be used: plugin broken of acme-broken 1.0 is broken: "
        "ModuleNotFoundError in acme_broken: No module named 'nothing_here'"
    )
    assert "plugin good of acme-good 1.0 is blocked: disabled by name" in refusal(manager, "good")
    assert "is incompatible: requires specdec-core >=7" in refusal(manager, "acme-old:older")
    assert "Not loaded: broken (acme-broken 1.0) is broken, old (acme-old 1.0) is incompatible" in refusal(
        manager, "xyz"
    )


def test_a_hint_leads_to_the_broken_plugin_that_carries_the_method(site):
    method, dist = list(known_methods().items())[-1]
    module = dist.replace("-", "_") + "_fake"
    site.add(dist, version="9.9", entries={"family": module}, files={f"{module}.py": "1 / 0"})
    assert "ZeroDivisionError" in refusal(PluginManager(), method)
    site.add_plugin("acme-x", methods=["x"])


def test_an_installed_carrier_without_the_method_wants_an_upgrade(site, monkeypatch):
    hints = {"newer": "acme-carrier"}  # of core's own any may be installed here
    monkeypatch.setattr("specdecode.plugins.resolution.known_methods", lambda: hints)
    site.add_plugin("acme-carrier", methods=["something_else"], version="0.0.1")
    assert "method 'newer' is not installed: pip install --upgrade acme-carrier." in refusal(
        PluginManager(), "newer"
    )


def test_a_method_provided_twice_is_refused_and_can_be_said_in_full(site):
    site.add_plugin("acme-one", methods=["shared"], family="one")
    site.add_plugin("acme-two", methods=["shared"], version="2.0", family="two")
    manager = PluginManager()
    assert refusal(manager, "shared") == (
        "method 'shared' is provided by acme-one 1.0 (plugin one) and acme-two 2.0 (plugin two); "
        "say 'acme-one:shared' or 'acme-two:shared', or disable one of them"
    )
    assert manager.resolve("acme-two:shared").version == "2.0"
    assert manager.resolve("Acme_One:shared").dist == "acme-one"
    assert manager.resolve("two:shared").dist == "acme-two"
    assert "'acme-one:other' does not exist: acme-one provides shared." in refusal(manager, "acme-one:other")
    assert PluginManager(disabled=["acme-two"]).resolve("shared").dist == "acme-one"


# -- by checkpoint -------------------------------------------------------------------------------------
def checkpoint(**config):
    return CheckpointInfo(path=Path("draft"), config=config, tensors={})


def manager_with(*specs):
    manager = PluginManager(allow=())
    manager.register(Plugin(*specs), "test")
    return manager


def test_the_one_method_that_recognises_a_checkpoint():
    heads = spec("heads", lambda c: Match("has heads") if "heads" in c.config else None)
    manager = manager_with(spec("blind"), heads)
    assert manager.recognize(checkpoint(heads=3)).spec is heads
    with pytest.raises(ConfigError) as raised:
        manager.recognize(checkpoint(architectures=["Llama"]))
    assert "no installed method recognises the draft checkpoint draft" in str(raised.value)
    assert "its config says ['Llama']" in str(raised.value)
    assert "asked: blind, heads; set method" in str(raised.value)


def test_two_that_recognise_it_are_both_shown():
    manager = manager_with(spec("a", lambda c: Match("one layer")), spec("b", lambda c: Match("has fc")))
    with pytest.raises(ConfigError, match=r"a of in-process \(one layer\) and b of in-process \(has fc\)"):
        manager.recognize(checkpoint())


@pytest.mark.parametrize("answer", [lambda c: c.config["absent"], lambda c: True, lambda c: sys.exit(1)])
def test_a_recognizer_at_fault_does_not_stop_the_others(answer):
    manager = manager_with(spec("faulty", answer), spec("b", lambda c: Match("mine") if c.config else None))
    assert manager.recognize(checkpoint(x=1)).spec.name == "b"
    with pytest.raises(
        ConfigError, match=r"could not tell: faulty \(in-process\): (KeyError|PluginError|SystemExit)"
    ):
        manager.recognize(checkpoint())
    strict = PluginManager(allow=(), strict=True)
    strict.register(Plugin(spec("faulty", answer)), "test")
    with pytest.raises((KeyError, PluginError, SystemExit)):
        strict.recognize(checkpoint())


# -- in this process -----------------------------------------------------------------------------------
def test_register_takes_objects_and_modules_and_says_what_is_wrong():
    manager = PluginManager(allow=())
    plugin = Plugin(spec("mine"))
    record = manager.register(plugin)
    assert (record.name, record.dist, record.status, record.methods) == (
        "Plugin", "in-process", Status.OK, ("mine",)
    )  # fmt: skip
    assert manager.register(plugin) == record
    module = types.ModuleType("my_module")
    module.specdecode_proposers = hookimpl(lambda: [spec("other")])
    assert manager.register(module).name == "my_module"
    assert [m.method for m in manager.methods()] == ["mine", "other"]
    with pytest.raises(PluginError, match="unregister"):
        manager.register(Plugin(spec("third")))
    with pytest.raises(PluginError, match="must yield ProposerSpecs, got int"):
        manager.register(Plugin(3), "numbers")
    assert manager.register(Plugin(spec("third")), "numbers").methods == (
        "third",
    )  # the faulty one left no trace


def test_an_in_process_method_conflicts_like_any_other(good):
    manager = PluginManager()
    manager.register(Plugin(spec("good")), "mine")
    assert "say 'acme-good:good' or 'in-process:good'" in refusal(manager, "good")
    manager.unregister("mine")
    assert manager.resolve("good").dist == "acme-good"
    with pytest.raises(PluginError, match="no plugin named 'mine'"):
        manager.unregister("mine")


def test_the_default_manager_is_one():
    assert default_manager() is default_manager()
