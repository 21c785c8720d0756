"""Whatever is wrong with one plugin is told of that one, and the others work."""

from __future__ import annotations

import logging
import sys
import types

import importlib_metadata
import pytest
from specdecode.contract import ConfigError
from specdecode.plugins import PluginError, PluginManager, Status

HOOK = "from specdecode.plugins import hookimpl\n@hookimpl\n"


def add_module(site, text, dist="acme-bad", name="bad", **options):
    module = dist.replace("-", "_")
    site.add(dist, entries={name: module}, files={f"{module}.py": text}, **options)


def test_a_plugin_without_faults_is_ok(good, record_of):
    manager = PluginManager()
    record = record_of(manager, "acme-good")
    assert (record.name, record.version, record.target) == ("good", "1.0", "acme_good.plugin")
    assert (record.status, record.detail, record.methods) == (Status.OK, "", ("good",))
    assert manager.resolve("good").provider == "acme-good 1.0"


FAULTS = {
    "import": ("from math import nonsense\n", Status.BROKEN, "ImportError in acme_bad: cannot import name"),
    "syntax": ("def broken(:\n", Status.BROKEN, "SyntaxError in acme_bad:"),
    "exit": ("raise SystemExit(3)\n", Status.BROKEN, "SystemExit in acme_bad: 3"),
    "unknown hook": (
        HOOK + "def specdecode_proposer():\n    return ()\n",
        Status.BROKEN,
        "unknown hook in acme_bad: specdecode_proposer (did you mean specdecode_proposers?)",
    ),
    "unmarked hook": (
        "def specdecode_proposers():\n    return ()\n",
        Status.BROKEN,
        "specdecode_proposers in acme_bad lacks @hookimpl",
    ),
    "hook argument": (
        HOOK + "def specdecode_cli(commands):\n    return None\n",
        Status.BROKEN,
        "PluginValidationError in acme_bad:",
    ),
    "raises half-way": (
        "import acme_good.plugin\n"
        + HOOK
        + "def specdecode_proposers():\n    yield from acme_good.plugin.specdecode_proposers()\n"
        + "    raise RuntimeError('no more')\n",
        Status.BROKEN,
        "RuntimeError in acme_bad: no more",
    ),
    "not iterable": (
        HOOK + "def specdecode_proposers():\n    return None\n",
        Status.BROKEN,
        "must yield ProposerSpecs, got NoneType",
    ),
    "returned": (
        HOOK
        + "def specdecode_proposers():\n    import acme_good.plugin\n"
        + "    return next(iter(acme_good.plugin.specdecode_proposers()))\n",
        Status.BROKEN,
        "must yield ProposerSpecs, got ProposerSpec, returned: write yield",
    ),
    "not a spec": (
        HOOK + "def specdecode_proposers():\n    yield 'spec'\n",
        Status.BROKEN,
        "must yield ProposerSpecs, got str",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_module_is_recorded_and_the_rest_works(good, record_of, fault):
    text, status, detail = FAULTS[fault]
    add_module(good, text)
    manager = PluginManager()
    record = record_of(manager, "acme-bad")
    assert record.status is status
    assert detail in record.detail
    assert record.methods == ()
    assert record_of(manager, "acme-good").status is Status.OK
    assert manager.resolve("good").dist == "acme-good"


SPEC_FAULTS = {
    "twice": ("METHODS = ['bad', 'bad']", "yields method 'bad' twice"),
    "colon": ("METHODS = ['a:b']", "a non-empty string without a colon, got 'a:b'"),
    "no attrs class": ("class Config:\n    pass", "config of method 'bad' must be an attrs class"),
    "policy key": (
        "@attrs.frozen(kw_only=True)\nclass Config:\n    adaptive: bool = False",
        "config of method 'bad' declares adaptive, which core owns",
    ),
    "no function": ("recognize = 3", "recognize of method 'bad' must be a function, got 3"),
    "imports": (
        "IMPORTS = 'torch'",
        "imports of method 'bad' must be a tuple of modules' names, got 'torch'",
    ),
    "annotation": (
        "@attrs.frozen(kw_only=True)\nclass Config:\n    x: 'Nowhere' = 1",
        "NameError in acme_bad.plugin: name 'Nowhere' is not defined",
    ),
}


@pytest.mark.parametrize("fault", SPEC_FAULTS)
def test_a_spec_that_breaks_the_rules(good, record_of, fault):
    extra, detail = SPEC_FAULTS[fault]
    good.add_plugin("acme-bad", methods=["bad"], extra=extra)
    manager = PluginManager()
    record = record_of(manager, "acme-bad")
    assert record.status is Status.BROKEN
    assert detail in record.detail
    assert [m.method for m in manager.methods() if m.dist.startswith("acme")] == ["good"]


def test_another_contract_api(good, record_of):
    good.add_plugin("acme-new", methods=["new"], api=3)
    good.add_plugin("acme-text", methods=["text"], api="'1'")
    manager = PluginManager()
    record, text = record_of(manager, "acme-new"), record_of(manager, "acme-text")
    remedy = "upgrade specdec-core, or install a release of the plugin for api 1"
    assert (record.status, record.detail) == (
        Status.INCOMPATIBLE,
        f"contract api 3; this core accepts 1: {remedy}",
    )
    assert (text.status, text.detail) == (
        Status.INCOMPATIBLE,
        "contract api '1'; this core accepts 1, an integer",
    )


def test_the_contract_before_is_accepted_with_a_warning_and_the_one_before_that_is_not(
    good, record_of, monkeypatch
):
    """As a core of contract 3 would see plugins for 1, 2 and 3."""
    from specdecode.plugins import loading
    from specdecode.plugins.check import check_plugins

    monkeypatch.setattr(loading, "API", 3)
    monkeypatch.setattr(loading, "ACCEPTED_API", (2, 3))
    for api in (1, 2, 3):
        good.add_plugin(f"acme-of-{api}", methods=[f"of-{api}"], api=api)
    manager = PluginManager(allow=[f"acme-of-{api}" for api in (1, 2, 3)])
    with pytest.warns(DeprecationWarning) as caught:
        records = {api: record_of(manager, f"acme-of-{api}") for api in (1, 2, 3)}
    said = "written for contract api 2, which a core of api 4 will refuse: upgrade it to a release for api 3"
    assert [str(w.message) for w in caught] == [f"plugin of-2 (acme-of-2 1.0) is {said}"]
    assert (records[1].status, records[1].detail) == (
        Status.INCOMPATIBLE,
        "contract api 1; this core accepts 2, 3: install a release of the plugin for api 3",
    )
    assert (records[2].status, records[2].detail) == (Status.OK, said)
    assert (records[3].status, records[3].detail) == (Status.OK, "")
    methods = {method.method: method.detail for method in manager.methods()}
    assert methods == {"of-2": f"drafts of of-2; {said}", "of-3": "drafts of of-3"}
    checked = {result.record.dist: result for result in check_plugins(manager)}
    assert said in checked["acme-of-2"].detail and not checked["acme-of-2"].faulty


def test_another_core_is_not_even_imported(good, record_of):
    add_module(good, "raise AssertionError('imported')", requires=["specdec-core>=7"])
    record = record_of(PluginManager(strict=False), "acme-bad")
    assert record.status is Status.INCOMPATIBLE
    assert record.detail.startswith("requires specdec-core >=7; installed is 0.")


def test_requirements_of_extras_and_other_platforms_do_not_count(good, record_of):
    good.add_plugin(
        "acme-extra",
        methods=["extra"],
        requires=["specdec-core>=7; extra == 'next'", "Specdec_Core>=7; sys_platform == 'nowhere'", "???"],
    )
    assert record_of(PluginManager(), "acme-extra").status is Status.OK


def test_two_distributions_with_the_same_entry_name_are_both_seen(site, record_of):
    site.add_plugin("acme-one", methods=["one"], family="same")
    site.add_plugin("acme-two", methods=["two"], family="same")
    manager = PluginManager()
    assert record_of(manager, "acme-one").status is record_of(manager, "acme-two").status is Status.OK
    assert (manager.resolve("one").dist, manager.resolve("two").dist) == ("acme-one", "acme-two")


def test_two_that_claim_a_method_conflict_in_this_method_only(good, record_of):
    good.add_plugin("acme-one", methods=["shared", "one"])
    good.add_plugin("acme-two", methods=["shared"], version="2.0")
    manager = PluginManager()
    detail = "also acme-two 2.0; say acme-one:shared or --no-plugin"
    record = record_of(manager, "acme-one")
    assert (record.status, record.detail) == (Status.CONFLICT, f"shared: {detail}")
    assert record_of(manager, "acme-two").status is Status.CONFLICT
    listed = {(m.dist, m.method): (m.status, m.detail) for m in manager.methods()}
    assert listed["acme-one", "shared"] == (Status.CONFLICT, detail)
    assert listed["acme-one", "one"] == (Status.OK, "drafts of one")
    assert listed["acme-good", "good"] == (Status.OK, "drafts of good")


def test_a_declared_module_that_is_missing_makes_the_method_unavailable(good, record_of):
    good.add_plugin("acme-heavy", methods=["heavy"], imports=["acme_engine.core", "math"])
    manager = PluginManager()
    assert record_of(manager, "acme-heavy").status is Status.OK
    (method,) = (m for m in manager.methods() if m.method == "heavy")
    assert method.status is Status.UNAVAILABLE
    assert method.detail == "module acme_engine.core not found (declared in imports)"


def test_a_shadowed_distribution_is_not_a_second_one(good, tmp_path, monkeypatch, record_of):
    later = type(good)(tmp_path / "later")
    later.add_plugin("acme-good", methods=["good", "old"], version="0.5")
    monkeypatch.setattr("sys.path", [*sys.path, str(later.path)])
    assert record_of(PluginManager(), "acme-good").version == "1.0"


@pytest.mark.parametrize(
    ("options", "detail"),
    [({"metadata": False}, "METADATA cannot be read"), ({"entry_points": "[specdecode]\nno target\n"}, "")],
    ids=["no METADATA", "bad entry_points.txt"],
)
def test_unreadable_metadata(good, record_of, options, detail):
    add_module(good, "", **options)
    record = record_of(PluginManager(), "acme-bad")
    assert record.status is Status.BROKEN
    assert detail in record.detail
    assert record_of(PluginManager(), "acme-good").status is Status.OK


def test_unreadable_metadata_of_others_is_no_concern(good, record_of):
    good.add("unrelated", entries={}, entry_points="[console_scripts]\nnonsense\n")
    good.add("undecodable", entries={})
    (good.path / "undecodable-1.0.dist-info" / "entry_points.txt").write_bytes(b"[specdecode]\xff\n")
    manager = PluginManager()
    assert record_of(manager, "acme-good").status is Status.OK
    assert "unrelated" not in {record.dist for record in manager.records}


def test_a_folder_named_otherwise_than_its_distribution(good, record_of):
    (good.path / "acme_good-1.0.dist-info").rename(good.path / "renamed-1.0.dist-info")
    importlib_metadata.MetadataPathFinder.invalidate_caches()
    assert record_of(PluginManager(), "acme-good").status is Status.OK


def test_a_core_that_is_not_installed_accepts_any_range(good, record_of, monkeypatch):
    good.add_plugin("acme-old", methods=["old"], requires=["specdec-core>=7"])
    monkeypatch.setattr("specdecode.plugins.discovery.CORE", "acme-core")
    assert record_of(PluginManager(), "acme-old").status is Status.OK


def test_a_module_that_is_loaded_without_a_spec_is_there(good, monkeypatch):
    monkeypatch.setitem(sys.modules, "acme_live", types.ModuleType("acme_live"))
    sys.modules["acme_live"].__spec__ = None
    good.add_plugin("acme-heavy", methods=["heavy"], imports=["acme_live"])
    assert {m.method: m.status for m in PluginManager().methods()}["heavy"] is Status.OK


# -- block, allow, strict -------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["bad", "acme-bad", "Acme_Bad", "other, bad"])
def test_a_blocked_plugin_is_not_imported(good, record_of, name):
    add_module(good, "raise AssertionError('imported')")
    manager = PluginManager(disabled=name)
    record = record_of(manager, "acme-bad")
    assert (record.status, record.detail) == (Status.BLOCKED, "disabled by name")
    assert manager.resolve("good")


def test_the_allow_list(good, record_of, monkeypatch):
    add_module(good, "raise AssertionError('imported')")
    monkeypatch.setenv("SPECDECODE_PLUGINS", " good ,")
    manager = PluginManager()
    assert record_of(manager, "acme-bad").detail == "not in SPECDECODE_PLUGINS"
    assert record_of(manager, "acme-good").status is Status.OK
    assert record_of(PluginManager(allow=["bad"]), "acme-good").detail == "not in the allow list"
    monkeypatch.setenv("SPECDECODE_PLUGINS", "")
    assert {record.status for record in PluginManager().records} == {Status.BLOCKED}


def test_a_name_that_is_not_installed_is_told(good, caplog):
    with caplog.at_level(logging.WARNING, logger="specdecode"):
        PluginManager(disabled=["acme-absent", "good"]).load()
    assert [record.message for record in caplog.records] == [
        "disabled plugins: no installed plugin or distribution is named 'acme-absent'"
    ]


def test_strict_raises_what_the_plugin_raised(good, monkeypatch):
    add_module(good, "raise KeyError('deep inside')")
    monkeypatch.setenv("SPECDECODE_STRICT_PLUGINS", "1")
    manager = PluginManager()
    assert manager.strict
    for _ in range(2):  # a failed load leaves nothing half-loaded
        with pytest.raises(KeyError, match="deep inside") as raised:
            manager.load()
        assert "while loading plugin bad (acme-bad 1.0)" in raised.value.__notes__
    monkeypatch.setenv("SPECDECODE_STRICT_PLUGINS", "0")
    assert not PluginManager().strict
    assert PluginManager().resolve("good")


def test_strict_raises_what_core_found(good):
    good.add_plugin("acme-new", methods=["new"], api=3)
    with pytest.raises(PluginError, match="contract api 3"):
        PluginManager(strict=True).load()
    assert PluginManager(disabled=["new"], strict=True).resolve("good")


def test_a_strict_switch_that_is_neither(monkeypatch):
    monkeypatch.setenv("SPECDECODE_STRICT_PLUGINS", "maybe")
    with pytest.raises(ConfigError, match="SPECDECODE_STRICT_PLUGINS must be 1 or 0, got 'maybe'"):
        PluginManager()


def test_loading_is_idempotent(good, record_of):
    counting = "LOADS = []\n" + HOOK + "def specdecode_proposers():\n    LOADS.append(1)\n    return ()\n"
    add_module(good, counting, "acme-count", "count")
    manager = PluginManager()
    manager.load()
    first = manager.records
    manager.load()
    assert manager.records == first
    import acme_count

    assert acme_count.LOADS == [1]
    assert PluginManager().records == first  # another manager of this process, as in a worker


# -- hooks beside proposers ------------------------------------------------------------------------------
def test_recipes_and_commands_survive_a_plugin_that_raises(good, caplog):
    recipe = HOOK + "def specdecode_recipes():\n    yield 'recipe of good'\n"
    raising = (
        HOOK
        + "def specdecode_recipes():\n    yield 'first'\n    raise OSError('recipes')\n"
        + "@hookimpl\ndef specdecode_cli(subcommands):\n    raise OSError('commands')\n"
    )
    exiting = (
        HOOK
        + "def specdecode_recipes():\n    raise SystemExit\n"
        + "@hookimpl\ndef specdecode_executors():\n    return 'mine'\n"
        + "@hookimpl\ndef specdecode_cli(subcommands):\n    raise SystemExit(2)\n"
    )
    adding = HOOK + "def specdecode_cli(subcommands):\n    subcommands.append('acme')\n"
    add_module(good, raising, "acme-a", "a")
    add_module(good, recipe, "acme-b", "b")
    add_module(good, adding, "acme-c", "c")
    add_module(good, exiting, "acme-d", "d")
    only = {"allow": ["acme-a", "acme-b", "acme-c", "acme-d"]}  # whatever else is installed here
    manager = PluginManager(**only)
    recipes, commands = manager.recipes(), []
    manager.add_commands(commands)
    assert recipes[-1] == "recipe of good"
    assert commands == ["acme"]
    assert [record.message for record in caplog.records] == [
        "plugin a (acme-a 1.0): OSError: recipes",
        "plugin d (acme-d 1.0): SystemExit: ",
        "plugin a (acme-a 1.0): OSError: commands",
        "plugin d (acme-d 1.0): SystemExit: 2",
    ]
    caplog.clear()
    assert not manager.executors()
    (record,) = caplog.records
    assert "specdecode_executors must yield what it offers, got str" in record.message
    with pytest.raises(OSError, match="commands"):
        PluginManager(strict=True, **only).add_commands([])
