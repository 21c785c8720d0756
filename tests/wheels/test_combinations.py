"""What somebody may have installed together: each combination lists, checks and generates as it should."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

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


NGRAM = {"method": "ngram", "num_speculative_tokens": 4}

#: Greedy tokens by each of the configs in ``argv``, or what was said instead; one process for all of them.
GENERATE = """
import json, sys
from specdecode import LLM, SamplingParams
from specdecode.contract import SpecdecodeError
params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
fields = dict(dtype="float32", max_model_len=64, device="cpu")
for config in map(json.loads, sys.argv[2:]):
    try:
        with LLM(sys.argv[1], speculative_config=config, **fields) as llm:
            found = list(llm.generate("abcabcabc", params, use_tqdm=False)[0].outputs[0].token_ids)
    except SpecdecodeError as error:
        found = str(error)
    print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    from specdecode.testing.tiny import tiny_checkpoint

    return tiny_checkpoint(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture
def generate(model, tmp_path):
    """Without speculation, then by each config."""

    def run(environment, *configs):
        written = [json.dumps(config) for config in (None, *configs)]
        done = environment.run("-c", GENERATE, str(model), *written, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        plain, *others = map(json.loads, done.stdout.splitlines())
        assert len(plain) == 12
        return plain, others

    return run


@pytest.fixture
def seen(tmp_path):
    """Distribution -> status and detail of ``plugins check``, and its exit status; the list says the same."""

    def look(environment):
        checked, listed = (
            environment.specdecode("plugins", command, "--json", cwd=tmp_path)
            for command in ("check", "list")
        )
        assert checked.stdout and listed.stdout, (checked.stderr, listed.stderr)
        found, told = (
            {plugin["distribution"]: plugin["status"] for plugin in json.loads(done.stdout)["plugins"]}
            for done in (checked, listed)
        )
        assert found == told
        details = {own["distribution"]: own["detail"] for own in json.loads(listed.stdout)["plugins"]}
        return found, details, checked.returncode

    return look


def test_core_alone(install, seen, generate, tmp_path):
    environment = install(*CORE)
    assert seen(environment) == ({}, {}, 0)
    assert (
        "specdec-ngram" in environment.specdecode("plugins", "list", cwd=tmp_path).stdout
    )  # what to install
    _, (said,) = generate(environment, NGRAM)
    assert "'ngram'" in said and "pip install specdec-ngram" in said


def test_core_and_one(install, seen, generate):
    environment = install(*CORE, "specdec_ngram")
    assert seen(environment)[::2] == ({"specdec-ngram": "ok"}, 0)
    plain, (drafted, said) = generate(environment, NGRAM, {"method": "suffix"})
    assert drafted == plain and "pip install specdec-suffix" in said


def test_all(install, wheels, seen):
    """That each of them generates is seen in ``test_wheels``."""
    found, _, status = seen(install(*wheels))
    assert set(found.values()) == {"ok"} and status == 0
    plugins = {distribution.replace("-", "_") for distribution in found}
    assert set(wheels) - plugins == {"specdec_core", "specdec_kernels", "specdec_heads_smollm2"}


def test_incompatible_and_broken_ones_do_not_disturb_the_others(install, seen, generate, tmp_path):
    environment = install(*CORE, "specdec_ngram")
    plugin = PLUGIN.format(name="contract", api=99)
    environment.add("specdec-contract", "specdec_contract", plugin)
    plugin = PLUGIN.format(name="newer", api=1)
    environment.add("specdec-newer", "specdec_newer", plugin, requires="specdec-core>=7,<8")
    environment.add("specdec-broken", "specdec_broken", "raise RuntimeError('no such luck')\n")
    found, details, status = seen(environment)
    assert status == 1 and found == {
        "specdec-ngram": "ok",
        "specdec-contract": "incompatible",
        "specdec-newer": "incompatible",
        "specdec-broken": "broken",
    }
    assert details["specdec-contract"].startswith(
        "contract api 99; this core accepts 1: upgrade specdec-core"
    )
    assert ">=7" in details["specdec-newer"] and "specdec-core" in details["specdec-newer"]
    assert details["specdec-broken"] == "RuntimeError in specdec_broken: no such luck"
    two = {"num_speculative_tokens": 2}
    wanted = [NGRAM, *({"method": name, **two} for name in ("contract", "newer", "broken"))]
    plain, (drafted, *said) = generate(environment, *wanted)
    assert drafted == plain
    assert all(word in text for word, text in zip(("api 99", ">=7", "no such luck"), said, strict=True))
    blocked = [
        word for name in ("contract", "newer", "broken") for word in ("--no-plugin", f"specdec-{name}")
    ]
    assert environment.specdecode("plugins", "check", *blocked, cwd=tmp_path).returncode == 0


def test_two_that_claim_one_name(install, seen, generate):
    environment = install(*CORE, "specdec_ngram")
    environment.add("specdec-rival", "specdec_rival", PLUGIN.format(name="ngram", api=1))
    assert seen(environment)[::2] == ({"specdec-ngram": "conflict", "specdec-rival": "conflict"}, 1)
    in_full = [NGRAM | {"method": f"{dist}:ngram"} for dist in ("specdec-ngram", "specdec-rival")]
    plain, (said, *drafted) = generate(environment, NGRAM, *in_full)
    assert "specdec-ngram:ngram" in said and "specdec-rival:ngram" in said
    assert drafted == [plain, plain]  # said in full, each works
