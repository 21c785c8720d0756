"""``specdecode plugins``: tables for people, one JSON object for programs, exit codes for scripts."""

from __future__ import annotations

import json

import pytest
from specdecode.cli.app import app
from specdecode.plugins import PluginManager, Status
from specdecode.plugins import manager as manager_module
from specdecode.plugins.check import check_plugins
from specdecode.plugins.discovery import discover
from typer.testing import CliRunner


@pytest.fixture(autouse=True)
def fresh_default(monkeypatch):
    monkeypatch.setattr(manager_module, "_default", None)


def run(*arguments):
    return CliRunner().invoke(app, list(arguments))


def run_json(*arguments, code=0):
    result = run(*arguments, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def checking(*blocked):
    """``plugins check`` of what a test wrote; the checkout's own plugins are checked in ``tests/wheels``."""
    own = sorted({found.dist for found in discover() if found.dist.startswith("specdec-")})
    return "plugins", "check", *(word for name in (*own, *blocked) for word in ("--no-plugin", name))


def lines(result):
    """The lines of a table, each cell parted from the next by one space."""
    return [" ".join(line.split()) for line in result.stdout.splitlines()]


def of_dist(entries, dist):
    (entry,) = (entry for entry in entries if entry["distribution"] == dist)
    return entry


@pytest.fixture
def faulty(good):
    good.add("acme-bad", entries={"bad": "acme_bad"}, files={"acme_bad.py": "1 / 0"}, version="0.3")
    return good


def test_list_as_a_table(faulty):
    result = run("plugins", "list")
    assert result.exit_code == 0
    header, *rows = lines(result)
    assert header == "METHOD PLUGIN DISTRIBUTION STATUS DETAIL"
    assert "good good acme-good 1.0 ok drafts of good" in rows
    assert "- bad acme-bad 0.3 broken ZeroDivisionError in acme_bad: division by zero" in rows


def test_list_as_json(faulty):
    listed = run_json("plugins", "list")
    assert listed.keys() == {"plugins", "methods"}
    assert of_dist(listed["plugins"], "acme-bad") == {
        "name": "bad",
        "distribution": "acme-bad",
        "version": "0.3",
        "target": "acme_bad",
        "status": "broken",
        "detail": "ZeroDivisionError in acme_bad: division by zero",
        "methods": [],
    }
    assert of_dist(listed["plugins"], "acme-good")["methods"] == ["good"]
    assert of_dist(listed["methods"], "acme-good") == {
        "method": "good",
        "plugin": "good",
        "distribution": "acme-good",
        "version": "1.0",
        "status": "ok",
        "detail": "drafts of good",
        "summary": "drafts of good",
    }


def test_no_plugin_is_repeatable(faulty):
    listed = run_json("plugins", "list", "--no-plugin", "bad", "--no-plugin", "acme-good")
    assert [of_dist(listed["plugins"], d)["status"] for d in ("acme-bad", "acme-good")] == ["blocked"] * 2


def test_list_with_nothing_installed(monkeypatch):
    monkeypatch.setattr(manager_module, "discover", lambda: iter(()))
    assert run("plugins", "list").stdout.startswith("No plugins are installed; pip install one of: specdec-")
    assert run("plugins", "check").exit_code == 0


def test_show_prints_the_keys(good):
    result = run("plugins", "show", "good")
    assert result.exit_code == 0
    assert "num_speculative_tokens int required draft tokens proposed a step, 1 to 1024" in lines(result)
    assert "window int 3 tokens to look at" in lines(result)


def test_show_tells_what_is_not_installed(site):
    site.add_plugin("acme-heavy", methods=["heavy"], imports=["acme_absent"])
    shown = lines(run("plugins", "show", "heavy"))
    assert "plugin heavy of acme-heavy 1.0, contract api 1: unavailable" in shown
    assert "module acme_absent not found (declared in imports)" in shown


def test_show_as_json(good):
    assert run_json("plugins", "show", "acme-good:good") == {
        "method": "good",
        "plugin": "good",
        "distribution": "acme-good",
        "version": "1.0",
        "status": "ok",
        "detail": "drafts of good",
        "summary": "drafts of good",
        "api": 1,
        "imports": [],
        "config": [
            {
                "name": "num_speculative_tokens",
                "type": "int",
                "required": True,
                "default": None,
                "doc": "draft tokens proposed a step, 1 to 1024",
            },
            {"name": "window", "type": "int", "required": False, "default": 3, "doc": "tokens to look at"},
        ],
        "model": None,
        "speculative_config": None,
        "needs": None,
    }


NEEDS = {
    "width": 4,
    "depth": 4,
    "shape": "chain",
    "probs": "none",
    "tokens": "new",
    "place": "host",
    "taps": [],
    "modules": [],
    "kv": [],
    "graphs": False,
    "scratch_bytes": 0,
    "ranks": "leader",
    "memory": "request",
    "scores": False,
    "continues": False,
    "children": [],
}


@pytest.fixture
def model(tmp_path):
    from specdecode.testing.tiny import tiny_checkpoint

    return str(tiny_checkpoint(tmp_path / "model"))


def test_show_for_a_model_prints_its_needs(good, model):
    shown = run_json("plugins", "show", "good", "--model", model)
    assert shown["model"] == model
    assert shown["speculative_config"] == {"method": "good", "num_speculative_tokens": 4}
    assert shown["needs"] == NEEDS
    given = '{"num_speculative_tokens": 7}'
    shown = run_json("plugins", "show", "good", "--model", model, "--spec-config", given)
    assert shown["needs"] == {**NEEDS, "width": 7, "depth": 7}
    table = run("plugins", "show", "good", "--model", model)
    assert 'with {"num_speculative_tokens": 4, "method": "good"}' in table.stdout
    assert "width 4" in lines(table)


def test_errors_are_one_clean_message(good):
    result = run("plugins", "show", "goood")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("error: method 'goood' is unknown: did you mean 'good'?")
    assert "Traceback" not in result.stderr
    assert run("plugins", "show").exit_code == 2
    assert run("plugins", "shwo", "good").exit_code == 2
    assert run("nonsense").exit_code == 2


def test_check_passes(good):
    checked = run_json(*checking())
    assert checked["ok"] is True
    assert of_dist(checked["plugins"], "acme-good") == {
        "name": "good",
        "distribution": "acme-good",
        "version": "1.0",
        "target": "acme_good.plugin",
        "status": "ok",
        "detail": "2 modules import",
        "methods": ["good"],
        "imports": [
            {"module": "acme_good", "ok": True, "detail": ""},
            {"module": "acme_good.plugin", "ok": True, "detail": ""},
        ],
    }


CHECKS = {
    "broken": ("raise RuntimeError('no kernel')", "acme_x.proposer: RuntimeError: no kernel"),
    "noisy": ("print('hello'); import acme_absent", "acme_x.proposer: ModuleNotFoundError:"),
    "killed": ("import os; os.kill(os.getpid(), 9)", "acme_x.proposer: the process died of SIGKILL"),
    "exits": ("import os; os._exit(3)", "acme_x.proposer: the process ended with status 3"),
}


@pytest.mark.parametrize("fault", CHECKS)
def test_check_finds_what_only_the_heavy_import_shows(site, fault):
    code, detail = CHECKS[fault]
    site.add_plugin("acme-x", methods=["x"])
    (site.path / "acme_x" / "proposer.py").write_text(code)
    assert of_dist(run_json("plugins", "list")["plugins"], "acme-x")["status"] == "ok"
    checked = run_json(*checking(), code=1)
    assert checked["ok"] is False
    entry = of_dist(checked["plugins"], "acme-x")
    assert entry["status"] == "broken"
    assert detail in entry["detail"]


def test_check_ends_an_import_that_hangs(site):
    site.add_plugin("acme-x", methods=["x"])
    (site.path / "acme_x" / "proposer.py").write_text("import time; time.sleep(600)")
    manager = PluginManager(allow=["acme-x"])
    (result,) = (r for r in check_plugins(manager, timeout_s=2) if r.record.dist == "acme-x")
    assert (result.status, result.detail) == (Status.BROKEN, "acme_x.proposer: takes longer than 2 s")


def test_check_tells_of_a_probe_that_does_not_start(site, monkeypatch):
    site.add_plugin("acme-x", methods=["x"])
    monkeypatch.setattr("sys.executable", "/bin/false")
    (result,) = (r for r in check_plugins(PluginManager(allow=["acme-x"])) if r.record.dist == "acme-x")
    assert result.detail == "(probe): the process ended with status 1: no message"


def test_check_skips_what_is_run_and_not_imported(site):
    site.add_plugin("acme-x", methods=["x"])
    for name in ("__main__", "conftest"):
        (site.path / "acme_x" / f"{name}.py").write_text("1 / 0")
    assert run(*checking()).exit_code == 0


def test_check_fails_on_recorded_faults_and_missing_modules(faulty):
    assert run(*checking()).exit_code == 1
    assert run(*checking("bad")).exit_code == 0
    faulty.add_plugin("acme-heavy", methods=["heavy"], imports=["acme_absent"])
    checked = run_json(*checking("bad"), code=1)
    entry = of_dist(checked["plugins"], "acme-heavy")
    assert (entry["status"], entry["detail"]) == (
        "unavailable",
        "not found (declared in imports): acme_absent",
    )


def test_check_imports_what_a_method_declares(site):
    site.add_plugin("acme-heavy", methods=["heavy"], imports=["acme_engine"])
    (site.path / "acme_engine.py").write_text("raise OSError('libacme.so: not found')")
    result = run(*checking())
    assert result.exit_code == 1
    assert "acme_engine: OSError: libacme.so: not found" in result.stdout


# -- the command itself ---------------------------------------------------------------------------------
def test_help_shows_core_commands_and_those_of_plugins(site):
    site.add(
        "acme-tool",
        entries={"tool": "acme_tool"},
        files={
            "acme_tool.py": """
                from specdecode.plugins import hookimpl

                @hookimpl
                def specdecode_cli(subcommands):
                    @subcommands.command()
                    def greet(name: str) -> None:
                        "Say hello."
                        print(f"hello {name}")

                    @subcommands.command("plugins")
                    def takeover() -> None:
                        print("taken over")
            """
        },
    )
    shown = run("--help")
    assert shown.exit_code == 0
    for command in ("generate", "bench", "plugins", "greet"):
        assert command in shown.stdout
    result = run("greet", "you")
    assert (result.exit_code, result.stdout) == (0, "hello you\n")
    assert "taken over" not in run("plugins", "list").stdout  # core's commands come first


def test_core_commands_do_not_load_plugins_that_are_blocked(faulty, monkeypatch):
    monkeypatch.setenv("SPECDECODE_STRICT_PLUGINS", "1")
    assert run("plugins", "list", "--no-plugin", "bad").exit_code == 0


def test_a_bad_setting_is_one_message_even_in_help(monkeypatch):
    monkeypatch.setenv("SPECDECODE_STRICT_PLUGINS", "maybe")
    result = run("--help")
    assert result.exit_code == 1
    assert "SPECDECODE_STRICT_PLUGINS must be 1 or 0, got 'maybe'" in result.stderr


def test_version():
    result = run("--version")
    assert (result.exit_code, result.stdout.split()[0]) == (0, "specdec-core")
