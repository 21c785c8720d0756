"""Rules that weigh the drafter's probabilities, and what re-scores a finished request."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    from specdecode.testing.tiny import table_checkpoint

    return str(table_checkpoint(tmp_path_factory.mktemp("table"), max_position_embeddings=256))


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_rules_that_keep_the_law_keep_the_structure(structured, kinds, table, rule):
    """What is drawn may be another text than without drafts, but greedy requests, and each is valid."""
    from specdecode import LLM

    asks = [
        structured.ask(kind.wish, temperature=temperature, seed=seed)
        for kind in kinds.values()
        for temperature, seed in ((0.0, None), (1.0, 1), (0.7, 2))
    ]
    spec = {"method": "scripted-sampler", "num_speculative_tokens": 4, "near": 1.0}
    engine = {"dtype": "float32", "max_model_len": 160}
    found = []
    for config in (None, spec | {"rejection_sample_method": rule}):
        with LLM(table, speculative_config=config, **engine) as llm:
            prompts = [{"prompt_token_ids": ask.prompt} for ask in asks]
            found.append(llm.generate(prompts, [ask.params for ask in asks], use_tqdm=False))
            accepted = {metric.name: metric.value for metric in llm.get_metrics()}
    assert accepted["vllm:spec_decode_num_accepted_tokens"] > 20
    stopped = 0
    for place, (plain, drafted) in enumerate(zip(*found, strict=True)):
        kind = list(kinds.values())[place // 3]
        (completion,) = drafted.outputs
        if place % 3 == 0:
            assert completion.token_ids == plain.outputs[0].token_ids
        if completion.finish_reason == "stop":
            stopped += 1
            assert kind.valid(completion.text), completion.text
        else:
            assert completion.finish_reason == "length"
            assert structured.grammar(kind.wish)(completion.token_ids)
    assert stopped > 10


def test_a_divergence_is_explained_under_the_grammar(structured):
    from specdecode.testing.divergence import explain_divergence

    ask = structured.ask({"regex": "[0-9]{3}"}, temperature=1.0, seed=5)
    ids = list(structured.alone(ask).outputs[0].token_ids)
    (seven, z) = structured.encode("7z")
    other = seven if ids[1] != seven else seven + 1
    llm = structured.rig("none").llm
    for wrong, possible in ((other, True), (z, False)):
        found = explain_divergence(llm, ask.prompt, ids, [ids[0], wrong, ids[2]], ask.params)
        assert found.position == 1 and found.best.token == ids[1] and found.a.gap == 0
        assert (found.b.gap < float("inf")) == possible


def test_shadow_mode_decodes_it_again(structured, kinds):
    asks = [
        structured.ask(kind.wish, **chance)
        for kind in kinds.values()
        for chance in ({}, {"temperature": 1.0, "seed": 3, "n": 2})
    ]
    config = structured.lab.config("oracle", structured.texts(asks))
    with structured.lab.rig(config, recorded=False, skip_tokenizer_init=False, shadow_rate=1.0) as rig:
        structured.run(rig, asks)
        rig.drain()
        assert rig.metric("specdecode:shadow_checked") == sum(ask.params.n for ask in asks)
        found = [
            metric.value for metric in rig.llm.get_metrics() if metric.name.endswith("shadow_mismatches")
        ]
        assert found == [0, 0]


def test_requests_keep_what_they_were_given(structured):
    """The mapping a schema was given as may be edited while the request runs."""
    schema = {
        "type": "object",
        "properties": {"a": {"const": 1}},
        "required": ["a"],
        "additionalProperties": False,
    }
    ask = structured.ask({"json": schema, "disable_any_whitespace": True})
    rig = structured.rig("none")
    rig.add("kept", ask)
    schema["properties"]["a"]["const"] = 2
    assert rig.drain()["kept"].outputs[0].text == '{"a":1}'
