"""What somebody may have installed together: each combination lists, checks and generates as it should."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("wheels")  # they are built once

CORE = ("specdec_core", "specdec_kernels")

#: A plugin of one method that drafts nothing, with room for what a test has it do.
PLUGIN = """
import attrs
from specdecode.contract import LengthFields, Needs, Proposer, ProposerSpec
from specdecode.plugins import hookimpl

@attrs.frozen(kw_only=True)
class Config(LengthFields):
    pass

class Nothing(Proposer):
    def propose(self, step, out):
        out.lens[:] = 0

@hookimpl
def specdecode_proposers():
    yield ProposerSpec(
        name={name!r}, summary="drafts nothing", api={api}, config=Config,
        needs=lambda config, context: Needs(width=2, depth=2),
        build=lambda config, context: Nothing(),
    )
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    from specdecode.testing.tiny import tiny_checkpoint

    return tiny_checkpoint(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture
def generate(model, tmp_path):
    """Greedy tokens by the command's own engine; or what it said instead."""

    def run(environment, config=None):
        code = f"""
import json
from specdecode import LLM, SamplingParams
from specdecode.contract import SpecdecodeError
params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
fields = dict(dtype="float32", max_model_len=64, device="cpu", speculative_config={config!r})
try:
    with LLM({str(model)!r}, **fields) as llm:
        print(json.dumps(list(llm.generate("abcabcabc", params, use_tqdm=False)[0].outputs[0].token_ids)))
except SpecdecodeError as error:
    print(json.dumps(str(error)))
"""
        return json.loads(environment.python(code, tmp_path))

    return run


@pytest.fixture
def seen(tmp_path):
    """Plugin -> status and detail of ``plugins list``, and the exit status of ``plugins check``."""

    def look(environment):
        told = []
        for command in ("list", "check"):
            done = environment.specdecode("plugins", command, "--json", cwd=tmp_path)
            assert done.stdout, done.stderr
            plugins = json.loads(done.stdout)["plugins"]
            told.append({plugin["distribution"]: (plugin["status"], plugin["detail"]) for plugin in plugins})
        listed, checked = told
        assert {d: s for d, (s, _) in listed.items()} == {d: s for d, (s, _) in checked.items()}
        return listed, done.returncode

    return look


NGRAM = {"method": "ngram", "num_speculative_tokens": 4}


def test_core_alone(install, seen, generate, tmp_path):
    environment = install(*CORE)
    assert seen(environment) == ({}, 0)
    assert (
        "specdec-ngram" in environment.specdecode("plugins", "list", cwd=tmp_path).stdout
    )  # what to install
    assert len(generate(environment)) == 12
    said = generate(environment, NGRAM)
    assert "'ngram'" in said and "pip install specdec-ngram" in said


def test_core_and_one(install, seen, generate):
    environment = install(*CORE, "specdec_ngram")
    listed, status = seen(environment)
    assert {dist: status for dist, (status, _) in listed.items()} == {"specdec-ngram": "ok"} and status == 0
    assert generate(environment, NGRAM) == generate(environment)
    assert "pip install specdec-suffix" in generate(environment, {"method": "suffix"})


def test_all(install, wheels, seen, generate):
    environment = install(*wheels)
    listed, status = seen(environment)
    assert {status for status, _ in listed.values()} == {"ok"} and status == 0
    assert len(listed) >= 9
    both = {"method": "cascade", "proposers": [NGRAM, {"method": "suffix", "num_speculative_tokens": 4}]}
    assert generate(environment, both) == generate(environment)


@pytest.mark.parametrize("kind", ["another contract", "another core"])
def test_an_incompatible_one(install, seen, generate, kind):
    environment = install(*CORE, "specdec_ngram")
    api = 99 if kind == "another contract" else 1
    requires = "specdec-core>=7,<8" if kind == "another core" else "specdec-core>=0.1,<1"
    environment.add(
        "specdec-future", "specdec_future", PLUGIN.format(name="future", api=api), requires=requires
    )
    listed, status = seen(environment)
    assert (
        listed["specdec-ngram"][0] == "ok" and listed["specdec-future"][0] == "incompatible" and status == 1
    )
    told = ("api 99", "accepts 1") if kind == "another contract" else (">=7", "specdec-core")
    assert all(word in listed["specdec-future"][1] for word in told)
    said = generate(environment, {"method": "future", "num_speculative_tokens": 2})
    assert "incompatible" in said and told[0] in said
    assert generate(environment, NGRAM) == generate(environment)


def test_a_broken_one(install, seen, generate, tmp_path):
    environment = install(*CORE, "specdec_ngram")
    environment.add("specdec-broken", "specdec_broken", "raise RuntimeError('no such luck')\n")
    listed, status = seen(environment)
    assert (
        listed["specdec-broken"] == ("broken", "RuntimeError in specdec_broken: no such luck") and status == 1
    )
    assert listed["specdec-ngram"][0] == "ok"
    assert generate(environment, NGRAM) == generate(environment)
    blocked = environment.specdecode("plugins", "check", "--no-plugin", "specdec-broken", cwd=tmp_path)
    assert blocked.returncode == 0


def test_two_that_claim_one_name(install, seen, generate):
    environment = install(*CORE, "specdec_ngram")
    environment.add("specdec-rival", "specdec_rival", PLUGIN.format(name="ngram", api=1))
    listed, status = seen(environment)
    assert {status for status, _ in listed.values()} == {"conflict"} and status == 1
    said = generate(environment, NGRAM)
    assert "specdec-ngram:ngram" in said and "specdec-rival:ngram" in said
    for dist in ("specdec-ngram", "specdec-rival"):  # said in full, each works
        assert generate(environment, NGRAM | {"method": f"{dist}:ngram"}) == generate(environment)
