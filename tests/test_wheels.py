"""Each distribution builds to a wheel and works from it, with no checkout on the path."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DISTRIBUTIONS = {
    "specdec_core": "core",
    "specdec_kernels": "kernels",
    "specdec_ngram": "plugins/ngram",
    "specdec_draft": "plugins/draft",
    "specdec_eagle": "plugins/eagle",
    "specdec_medusa": "plugins/medusa",
    "specdec_mlp": "plugins/mlp",
    "specdec_mtp": "plugins/mtp",
    "specdec_suffix": "plugins/suffix",
    "specdec_combine": "plugins/combine",
    "specdec_train": "training",
    "specdec_fleet": "fleet",
    "specdec_heads_smollm2": "heads/smollm2",
}
#: The scaffold of ``specdecode new-plugin``: its tests are data of core's.
TEMPLATE = "specdecode/scaffold/template/"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("wheels")
    for folder in DISTRIBUTIONS.values():
        subprocess.run(
            [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT / folder],
            check=True,
            capture_output=True,
        )
    return {path.name.split("-")[0]: path for path in out.glob("*.whl")}


def unpacked(wheels: dict[str, Path], into: Path, *names: str) -> dict[str, str]:
    """An environment in which ``names`` come from their wheels, before anything installed."""
    for name in names:
        zipfile.ZipFile(wheels[name]).extractall(into)
    return os.environ | {"PYTHONPATH": str(into), "OMP_NUM_THREADS": "1"}


def python(environment: dict[str, str], code: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=cwd, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_distribution_has_a_wheel_with_its_licence_and_types(wheels):
    assert set(wheels) == set(DISTRIBUTIONS)
    for path in wheels.values():
        names = zipfile.ZipFile(path).namelist()
        assert any(name.endswith("licenses/LICENSE") for name in names), path.name
        assert any(name.endswith("py.typed") for name in names), path.name
        tests = [name for name in names if "tests" in Path(name).parts or Path(name).name.startswith("test_")]
        assert not [name for name in tests if not name.startswith(TEMPLATE)], path.name


def test_core_ships_its_data(wheels):
    names = zipfile.ZipFile(wheels["specdec_core"]).namelist()
    assert "specdecode/hints.toml" in names
    assert any(name.startswith(f"{TEMPLATE}tests/") for name in names)
    assert any(name.startswith("specdecode/bench/data/") for name in names)


def test_trained_heads_ship_their_weights(wheels):
    names = zipfile.ZipFile(wheels["specdec_heads_smollm2"]).namelist()
    trained = {name.rsplit("/", 1)[0] for name in names if name.endswith("/training.json")}
    assert trained and {f"{folder}/model.safetensors" for folder in trained} <= set(names)


def test_generation_works_from_the_wheels(wheels, tmp_path):
    site = tmp_path / "site"
    environment = unpacked(wheels, site, *wheels)
    code = f"""
import importlib
for name in ["specdecode", *{[name for name in DISTRIBUTIONS if name != "specdec_core"]!r}]:
    module = importlib.import_module(name)
    assert module.__file__.startswith({str(site)!r}), module.__file__
from pathlib import Path
from specdecode import LLM, SamplingParams
from specdecode.testing.tiny import tiny_checkpoint
folder = Path({str(tmp_path)!r})
path = tiny_checkpoint(folder / "tiny")
params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
def run(**keywords):
    with LLM(path, dtype="float32", max_model_len=64, device="cpu", **keywords) as llm:
        return list(llm.generate("abcabcabc", params, use_tqdm=False)[0].outputs[0].token_ids)
plain = run()
assert len(plain) == 12
from specdec_eagle.testing import write_head
from specdec_medusa.testing import write_heads
from specdec_mlp.testing import write_speculator
from specdec_mtp.testing import write_modules
lookups = [{{"method": name, "num_speculative_tokens": 4}} for name in ("ngram", "suffix")]
models = [path, write_head(folder / "head", "eagle", path), write_heads(folder / "heads", "medusa-1", path)]
models += [write_speculator(folder / "speculator", path), write_modules(folder / "modules", path)]
heads = [{{"model": str(model), "num_speculative_tokens": 4}} for model in models]
for config in [*lookups, *heads, {{"method": "cascade", "proposers": [*lookups, heads[1]]}}]:
    assert plain == run(speculative_config=config), config
print("same")
"""
    assert python(environment, code, tmp_path).strip() == "same"


def test_core_without_any_plugin_decodes_and_says_what_to_install(wheels, tmp_path):
    """``-S`` keeps what this environment installed out; its third-party packages are put back by path."""
    site = tmp_path / "site"
    environment = unpacked(wheels, site, "specdec_core", "specdec_kernels")
    bare = tmp_path / "bare"
    bare.mkdir()
    third_party = Path(pytest.__file__).resolve().parent.parent
    for entry in third_party.iterdir():
        if "specdec" not in entry.name.lower() and not entry.name.endswith(".pth"):
            (bare / entry.name).symlink_to(entry)
    environment["PYTHONPATH"] = os.pathsep.join([str(site), str(bare)])
    code = f"""
import importlib.util
assert importlib.util.find_spec("specdec_ngram") is None
from specdecode import LLM, SamplingParams
from specdecode.contract import SpecdecodeError
from specdecode.testing.tiny import tiny_checkpoint
path = tiny_checkpoint({str(tmp_path / "tiny")!r})
with LLM(path, dtype="float32", max_model_len=64, device="cpu") as llm:
    out = llm.generate("abc", SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True), use_tqdm=False)
    assert len(out[0].outputs[0].token_ids) == 4
try:
    LLM(path, speculative_config={{"method": "ngram", "num_speculative_tokens": 4}})
except SpecdecodeError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "pip install specdec-ngram" in done.stdout and "'ngram'" in done.stdout


def test_the_command_works_from_the_wheel(wheels, tmp_path):
    environment = unpacked(wheels, tmp_path / "site", *wheels)
    code = (
        "import sys; from specdecode.cli import main; "
        "sys.argv = ['specdecode', 'plugins', 'list', '--json']; main()"
    )
    listed = json.loads(python(environment, code, tmp_path))
    assert "ngram" in json.dumps(listed)
