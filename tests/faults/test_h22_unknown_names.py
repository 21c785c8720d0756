"""H22: unknown names are told with what is known, missing packages with the command; options act."""

from __future__ import annotations

import pytest

K = 4


def refused(faults, config):
    with pytest.raises(ValueError) as caught:
        faults.engine(config, recorded=False)
    return str(caught.value)


def test_h22_an_unknown_method(faults):
    message = refused(faults, {"method": "egale", "num_speculative_tokens": 3})
    assert "speculative_config.method 'egale'" in message and "did you mean 'eagle'" in message
    for known in ("ngram", "scripted-oracle", "scripted-medusa"):
        assert known in message


@pytest.mark.parametrize(
    ("method", "given", "meant"),
    [
        ("ngram", "prompt_lookup_maxx", "prompt_lookup_max"),
        ("ngram", "prompt_lookup_mni", "prompt_lookup_min"),
        ("ngram", "disable_by_batchsize", "disable_by_batch_size"),
        ("scripted-oracle", "wrongat", "wrong_at"),
        ("scripted-eagle", "three_tap", "three_taps"),
    ],
)
def test_h22_a_misspelt_key(faults, method, given, meant):
    message = refused(faults, {"method": method, "num_speculative_tokens": 3, given: 4})
    assert f"speculative_config.{given} is not a known key; did you mean {meant!r}?" in message


def test_h22_a_key_of_another_method(faults):
    message = refused(faults, {"method": "ngram", "num_speculative_tokens": 3, "wrong_at": [1]})
    assert "speculative_config.wrong_at is not a known key" in message


def test_h22_a_known_method_that_is_not_installed(faults, monkeypatch):
    from specdecode.plugins.hints import known_methods

    monkeypatch.setitem(known_methods(), "acme", "specdec-acme")  # whatever is installed here
    message = refused(faults, {"method": "acme", "num_speculative_tokens": 3})
    assert "pip install specdec-acme" in message and "Installed methods: " in message


# -- a method whose optional package is not there -------------------------------------------------
def start(lab, spec_fields, build):
    """An engine with a method ``wants-more``."""
    from specdecode import EngineArgs, LLMEngine
    from specdecode.contract import API, LengthFields, Needs, ProposerSpec
    from specdecode.plugins import PluginManager, hookimpl

    class Plugin:
        @hookimpl
        def specdecode_proposers(self):
            yield ProposerSpec(
                name="wants-more",
                summary="wants a package",
                api=API,
                config=LengthFields,
                needs=lambda config, context: Needs(width=K, depth=K),
                build=build,
                **spec_fields,
            )

    manager = PluginManager()
    manager.register(Plugin(), name="wants-more")
    config = {"method": "wants-more", "num_speculative_tokens": K}
    args = EngineArgs(
        str(lab.target), speculative_config=config, max_model_len=64, num_gpu_blocks_override=16
    )
    return LLMEngine(args, manager)


def test_h22_a_declared_package_that_is_missing(lab):
    with pytest.raises(ValueError) as caught:
        start(lab, {"imports": ("no_such_package.part",)}, build=lambda *_: None)
    message = str(caught.value)
    assert "'wants-more'" in message and "no_such_package" in message and "install" in message


def test_h22_a_package_that_fails_only_when_it_is_imported(lab):
    """At construction, and not as plain decoding without a word."""

    def build(config, context):
        import no_such_package  # noqa: F401

    with pytest.raises(Exception) as caught:
        start(lab, {}, build)
    shown = f"{caught.value} {caught.value.__cause__}"
    assert "wants-more" in shown and "no_such_package" in shown


# -- options act ----------------------------------------------------------------------------------
@pytest.mark.parametrize("k", [1, 3, 7])
@pytest.mark.parametrize(
    "drafter", ["oracle", "liar", "oracle-tree", "ngram", "self-draft", "small-draft", "eagle"]
)
def test_h22_k_reaches_the_drafter(faults, drafter, k):
    """Of a drafter that always gives ``k``: drafted tokens per drafting step, and positions of the vector."""
    ask = faults.ask([60, 61, 62, 63] * 6, max_tokens=80, ignore_eos=True)
    fields = {}
    if drafter == "ngram":
        fields = {"prompt_lookup_min": 2, "prompt_lookup_max": 2}
        ask = faults.ask(ask.prompt, max_tokens=80, ignore_eos=True, allowed_token_ids=[60])
    engine = faults.engine(faults.drafter(drafter, faults.texts([ask]), k, **fields))
    llm = engine.llm.llm_engine
    llm.add_request("a", {"prompt_token_ids": ask.prompt}, ask.params)
    for _ in range(7):
        llm.step()
    assert engine.drafts > 0
    assert engine.drafted == k * engine.drafts
    assert len(engine.metric("vllm:spec_decode_num_accepted_tokens_per_pos")) == k
    llm.abort_request("a")


def test_h22_options_of_a_method_reach_it(faults):
    """Each changes what is drafted for one history."""
    prompt = [61, 62, 63, 67, 69, 63, 68, 61, 62]
    free = faults.ask(prompt, max_tokens=12, ignore_eos=True)
    repetitive = faults.ask(prompt, max_tokens=12, ignore_eos=True, logit_bias={63: 100.0, 62: 99.0})
    texts = faults.texts([free])

    def drafts(config):
        engine = faults.engine(config)
        ask = repetitive if config["method"] == "ngram" else free
        engine.generate([ask])
        return [draft.ids for draft in engine.recording.drafts]

    variants = {
        "ngram": [
            {"prompt_lookup_min": 3, "prompt_lookup_max": 3},
            {"prompt_lookup_min": 1, "prompt_lookup_max": 1},
        ],
        "oracle": [{"wrong_at": [0]}, {"wrong_at": [2]}],
        "oracle-tree": [{"decoys": 0.9}, {"depth": 1}, {"seed": 5}],
        "self-draft": [{"layers": 1}],
        "eagle": [{"three_taps": True}, {"seed": 9}, {"fanout": 2}],
    }
    for drafter, changes in variants.items():
        plain = drafts(faults.drafter(drafter, texts, K))
        for change in changes:
            assert drafts(faults.drafter(drafter, texts, K, **change)) != plain, (drafter, change)


def test_h22_disable_by_batch_size_acts(faults, same):
    asks = [faults.ask(faults.prompt(index)[:8], max_tokens=10, ignore_eos=True) for index in range(4)]
    config = faults.drafter("oracle", faults.texts(asks), K) | {"disable_by_batch_size": 3}
    engine = faults.engine(config, recorded=False)
    same(engine.generate(asks[:2]), faults.base(asks[:2]))
    before = engine.drafted
    same(engine.generate(asks), faults.base(asks))
    assert before > 0 and engine.drafted == before
