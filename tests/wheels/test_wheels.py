"""Each distribution builds to a wheel and works from it, with no checkout on the path."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
#: The scaffold of ``specdecode new-plugin``: its tests are data of core's.
TEMPLATE = "specdecode/scaffold/template/"


def test_every_distribution_has_a_wheel_with_its_licence_and_types(wheels):
    readme = (ROOT / "docs/architecture.md").read_text()
    named = {name.replace("-", "_") for name in re.findall(r"`(specdec-[a-z0-9-]+)`", readme)}
    assert set(wheels) == named  # each has a line in the table
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


def test_generation_works_from_the_wheels(wheels, install, tmp_path):
    environment = install(*wheels)
    code = f"""
import importlib
for name in ["specdecode", *{[name for name in wheels if name not in ("specdec_core", "specdec_fleet")]!r}]:
    module = importlib.import_module(name)
    assert module.__file__.startswith({str(environment.site)!r}), module.__file__
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
    assert environment.python(code, tmp_path).strip() == "same"
