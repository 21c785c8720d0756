"""Every kind of drafter through every turn of a request's life, in both orders of a step.

After each scenario the outputs are those of a decoder without cache, batch or drafts, every draft is
that of a stateless reference, and neither blocks nor proposer state are left (see ``conftest.Rig``).
"""

from __future__ import annotations

import pytest

METHODS = (
    "none",
    "oracle",
    "liar",
    "ragged",
    "oracle-tree",
    "ngram",
    "self-draft",
    "small-draft",
    "draft-model",
    "eagle",
    "eagle-fixed-tree",
    "eagle-grown-tree",
    "eagle3",
    "eagle3-grown-tree",
    "medusa",
    "cascade",
    "cascade-on-device",
)

pytestmark = [
    pytest.mark.parametrize("order", ["plain", "late"]),
    pytest.mark.parametrize("method", METHODS),
]


def test_alone(lab, method, order):
    asks = [ask for index, ask in enumerate(lab.mixed()) if index in (0, 1, 6)]
    with lab.rig(method, asks, order) as rig:
        for ask in asks:
            rig.generate([ask])


def test_batch_of_mixed_lengths(lab, method, order):
    asks = lab.mixed()
    with lab.rig(method, asks, order) as rig:
        outputs = rig.generate(asks)
        drafted = rig.metric("vllm:spec_decode_num_draft_tokens")
        accepted = rig.metric("vllm:spec_decode_num_accepted_tokens")
        assert (drafted > 0) == (method != "none")
        if method in ("oracle", "oracle-tree", "ragged"):
            assert accepted > 60
        if method == "liar":
            assert accepted == 0
        if method == "self-draft":  # its guess is exact where no penalty counts the drafts before it
            for ask, output in zip(asks, outputs, strict=True):
                if not (ask.params.frequency_penalty or ask.params.presence_penalty):
                    assert output.metrics.accepted == output.metrics.drafted > 0


def test_as_installed(lab, method, order):
    """Without the recorder around it."""
    asks = lab.mixed()
    with lab.rig(method, asks, order, recorded=False) as rig:
        rig.generate(asks)
        assert (rig.metric("vllm:spec_decode_num_draft_tokens") > 0) == (method != "none")


def test_chunked_prefill(lab, method, order):
    asks = lab.mixed()
    with lab.rig(method, asks, order, max_num_batched_tokens=16) as rig:
        forward, sizes = rig.core.runner.forward, []
        rig.core.runner.forward = lambda plan: (sizes.append(plan.num_tokens), forward(plan))[1]
        rig.generate(asks)
        assert max(sizes) == 16  # drafts are charged to the budget


def test_preemption(lab, method, order):
    asks = lab.mixed(max_tokens=24)
    with lab.rig(method, asks, order, num_gpu_blocks_override=34) as rig:
        rig.generate(asks)
        assert rig.metric("vllm:num_preemptions") > 0
        if rig.recording is not None:
            assert any(event.kind == "resume" for event in rig.recording.events)


def test_a_request_that_fills_the_pool(lab, method, order):
    """Drafts are cut to what is left; three of them take turns."""
    asks = [
        lab.ask(lab.prompt(index)[:19], temperature=0, max_tokens=100, ignore_eos=True) for index in (3, 4, 5)
    ]
    with lab.rig(method, asks, order, num_gpu_blocks_override=12, max_model_len=48) as rig:
        for output in rig.generate(asks):
            assert len(output.outputs[0].token_ids) == 29
        assert rig.metric("vllm:num_preemptions") > 0


def test_prefix_hits(lab, method, order):
    """Prompts that share blocks with earlier ones, ending around a block's end; and a second turn."""
    stem = lab.prompt(7)[:16]
    tails = ([11, 12, 13], [19], [], range(11, 20), [19, 12, 13, 14, 15, 16, 17], range(11, 21))
    prompts = [stem + list(tail) for tail in tails] + [stem[:15]]
    kinds = ({"temperature": 0}, {"temperature": 0.9, "top_p": 0.9, "seed": 5})
    asks = [lab.ask(ids, max_tokens=10, **kinds[index % 2]) for index, ids in enumerate(prompts)]
    second_turn = lab.ask(asks[0].prompt + lab.expected(asks[0]) + [7, 7], max_tokens=12, **kinds[0])
    with lab.rig(method, [*asks, second_turn], order) as rig:
        for ask in asks:
            rig.generate([ask])
        rig.generate(asks)
        (output,) = rig.generate([second_turn])
        assert output.num_cached_tokens >= len(second_turn.prompt) - 8
        assert rig.metric("vllm:prefix_cache_hits") > 150


def test_spells_without_budget(lab, method, order):
    """Drafting off for some requests, short for others, and off for all while three or more run."""
    wishes = (None, False, 2, None, 1, None, 0, 3)
    asks = [
        lab.ask(ask.prompt, temperature=0.9, seed=3 + index, max_tokens=30 - 3 * index, speculation=wish)
        for index, (ask, wish) in enumerate(zip(lab.mixed(), wishes, strict=True))
    ]
    policy = None if method == "none" else {"disable_by_batch_size": 3}
    with lab.rig(method, asks, order, policy=policy) as rig:
        outputs = rig.generate(asks)
        if method not in ("none", "ngram"):  # nothing repeats in what is drawn
            assert rig.metric("vllm:spec_decode_num_draft_tokens") > 0
        for ask, output in zip(asks, outputs, strict=True):
            if ask.params.speculation is not None:
                assert output.metrics.drafted <= ask.params.speculation * output.metrics.draft_steps
        if rig.recording is not None:
            assert any(not record.budget and record.room for record in rig.recording.drafts)


def test_aborts(lab, method, order):
    """Of requests in prefill, running, waiting, unknown and aborted before; the id is free again."""
    asks = lab.mixed(max_tokens=40)
    with lab.rig(method, asks, order, max_num_batched_tokens=24, max_num_seqs=6) as rig:
        for index, ask in enumerate(asks):
            rig.add(f"r{index}", ask)
        rig.step()
        (half_way,) = (r for r in rig.core.scheduler.running if r.id.startswith("r2/"))
        assert 0 < half_way.computed < len(half_way.prompt_ids)
        rig.abort("nobody", "r2", "r7")  # r7 waits
        finished = rig.step(3)
        rig.abort("r1", "r1", "r2")
        rig.add("r2", asks[2])
        finished |= rig.step()
        rig.abort("r5")
        finished |= rig.drain()
        assert sorted(finished) == ["r0", "r2", "r3", "r4", "r6"]
        for name, output in finished.items():
            rig.compare(asks[int(name[1:])], output)


def test_completions_of_one_prompt(lab, method, order):
    asks = lab.mixed(6, n=3, max_tokens=12)
    with lab.rig(method, asks, order) as rig:
        outputs = rig.generate(asks)
        greedy, seeded = ({tuple(c.token_ids) for c in output.outputs} for output in outputs[:2])
        assert (len(greedy), len(seeded)) == (1, 3)
        assert rig.metric("vllm:prefix_cache_hits") > 0


def test_stop_at_each_token(lab, method, order):
    """The token that ends the output stands at every offset of a draft, and in the bonus slot."""
    bases = [lab.mixed()[index] for index in (0, 1, 6)]
    stops = [
        lab.ask(
            base.prompt,
            temperature=base.params.temperature,
            top_p=base.params.top_p,
            min_p=base.params.min_p,
            seed=base.params.seed,
            max_tokens=12,
            stop_token_ids=[lab.expected(lab.ask(base.prompt, **_law(base), max_tokens=12))[offset]],
        )
        for offset in range(1, 8)
        for base in bases
    ]
    with lab.rig(method, stops, order) as rig:
        outputs = rig.generate(stops)
        assert all(output.outputs[0].finish_reason == "stop" for output in outputs)


def test_end_of_the_context(lab, method, order):
    asks = [lab.ask(lab.prompt(6)[:length], temperature=0, max_tokens=100) for length in (3, 24, 29, 30, 31)]
    with lab.rig(method, asks, order, max_model_len=32) as rig:
        outputs = rig.generate(asks)
        assert [len(ask.prompt) + len(o.outputs[0].token_ids) for ask, o in zip(asks, outputs, strict=True)]
        for ask, output in zip(asks, outputs, strict=True):
            ids = output.outputs[0].token_ids
            assert len(ask.prompt) + len(ids) == 32 or ids[-1] == 2


def _law(ask):
    return {name: getattr(ask.params, name) for name in ("temperature", "top_p", "min_p", "seed")}
