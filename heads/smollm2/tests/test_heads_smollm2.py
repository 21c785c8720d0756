"""The heads that are here, and how they are found."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import specdec_heads_smollm2 as package

FOLDER = Path(package.__file__).parent
MOST = 30 << 20  #: bytes of all heads together
FILES = {"config.json", "training.json"}


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Two heads for a target and one for another."""
    monkeypatch.setattr(package, "_FOLDER", tmp_path)
    for name, known in (("b", "one"), ("a", "one"), ("c", "two"), ("d", "one")):
        (tmp_path / name).mkdir()
        told = {
            "method": name,
            "target_fingerprint": known,
            "speculative_config": {"method": name, "num_speculative_tokens": 5},
            "reference": name == "d",
        }
        (tmp_path / name / "training.json").write_text(json.dumps(told))
    (tmp_path / "not_a_head").mkdir()
    return tmp_path


def test_heads_are_found_by_name(made):
    assert package.names() == ("a", "b", "c", "d")
    assert package.path("b") == made / "b"
    with pytest.raises(KeyError, match=r"no head is named 'eagle9'; there are a, b, c, d"):
        package.path("eagle9")
    with pytest.raises(KeyError, match="there are a, b, c, d"):
        package.path("not_a_head")


def test_a_target_is_offered_its_own_heads_ready_to_use(made):
    assert package.heads("one") == [
        {"method": name, "num_speculative_tokens": 5, "model": str(made / name)} for name in ("a", "b")
    ]
    assert package.heads("three") == []


def test_what_is_kept_here_is_small():
    assert sum(file.stat().st_size for file in FOLDER.rglob("*") if file.is_file()) <= MOST


@pytest.mark.parametrize("name", package.names())
def test_each_head_is_whole_and_says_where_it_comes_from(name):
    folder = package.path(name)
    present = {file.name for file in folder.iterdir()}
    assert present >= FILES and any(file.endswith(".safetensors") for file in present)
    trained = json.loads((folder / "training.json").read_text("utf-8"))
    assert trained["licence"] and trained["target_fingerprint"] and trained["held_out"]["length"] > 1
    assert trained["speculative_config"]["method"] == trained["method"]
    assert "/" not in trained["model"] and all("/" not in source for source in trained["data"])
    assert all(
        trained["target_fingerprint"]
        == json.loads((package.path(other) / "training.json").read_text("utf-8"))["target_fingerprint"]
        for other in package.names()
    )


def test_the_readme_says_what_the_heads_say():
    pytest.importorskip("specdec_train")
    file = Path(__file__).parent.parent / "make_readme.py"
    spec = importlib.util.spec_from_file_location("make_heads_readme", file)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    trained = {
        name: json.loads((package.path(name) / "training.json").read_text("utf-8"))
        for name in package.names()
    }
    text = (file.parent / "README.md").read_text("utf-8")
    sizes = {name: script._size(package.path(name)) for name in trained}
    assert text == script.readme(trained, sizes), "run python heads/smollm2/make_readme.py"
