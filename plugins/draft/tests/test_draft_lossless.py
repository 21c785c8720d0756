"""Drafting with a model changes no output, and a copy of the target is always right."""

import pytest

pytestmark = pytest.mark.parametrize("late", [False, True], ids=["plain", "late"])
K = 4


def mixed(kit, count=8, **changes):
    kinds = [
        {"temperature": 0},
        {"temperature": 1.0, "seed": 5},
        {"temperature": 0.8, "top_p": 0.9, "seed": 6},
        {"temperature": 0, "repetition_penalty": 1.2},
    ]
    return [
        kit.ask(
            [3 + (11 * index + 7 * j) % 290 for j in range(5 + 6 * index)],
            **({"max_tokens": 16 + 3 * index} | kinds[index % 4] | changes),
        )
        for index in range(count)
    ]


@pytest.mark.parametrize("sampling", ["probabilistic", "greedy"])
def test_alone_together_chunked_preempted_and_cached(kit, llm_of, target, draft, late, sampling):
    asks = mixed(kit)
    want = kit.ids(kit.generate(llm_of(target), asks))
    spec = {"draft_sample_method": sampling}
    llm = llm_of(target, draft, K, spec, async_scheduling=late)
    assert kit.ids([kit.generate(llm, [one])[0] for one in asks]) == want, "batch 1, a cold cache"
    assert kit.ids(kit.generate(llm, asks)) == want, "batch 8, a warm cache"
    assert kit.metric(llm, "vllm:prefix_cache_hits") > 100
    assert kit.metric(llm, "vllm:spec_decode_num_accepted_tokens") > 30
    chunked = llm_of(target, draft, K, spec, async_scheduling=late, max_num_batched_tokens=16)
    assert kit.ids(kit.generate(chunked, asks)) == want
    small = llm_of(
        target, draft, K, spec, async_scheduling=late, num_gpu_blocks_override=34, max_model_len=96
    )
    assert kit.ids(kit.generate(small, asks)) == want
    assert kit.metric(small, "vllm:num_preemptions") > 0


def test_a_spell_with_speculation_off(kit, llm_of, target, late):
    """While three or more run there are no drafts; then the copy of the target is right at once."""
    asks = mixed(kit, 4, temperature=0.9, seed=8, repetition_penalty=1.0)
    asks = [kit.ask(prompt, **KIND, max_tokens=12 + 20 * i) for i, (prompt, _) in enumerate(asks)]
    want = kit.ids(kit.generate(llm_of(target), asks))
    llm = llm_of(target, target, K, {"disable_by_batch_size": 3}, async_scheduling=late)
    outputs = kit.generate(llm, asks)
    assert kit.ids(outputs) == want
    last = outputs[-1].metrics
    assert 20 < last.drafted == last.accepted < len(want[-1])


KIND = {"temperature": 0.9, "seed": 8}


@pytest.mark.parametrize("temperature", [0, 1.0], ids=["greedy", "seeded"])
@pytest.mark.parametrize("offset", [None, *range(K)])
def test_the_target_as_its_own_draft(kit, llm_of, target, monkeypatch, late, offset, temperature):
    """Over 200 tokens every draft is accepted, but where one is spoiled: at ``offset``, each third length."""
    import torch
    from specdec_draft.proposer import DraftModelProposer

    propose = DraftModelProposer.propose

    def spoil(self, step, out):
        propose(self, step, out)
        if offset is not None:
            wrong = (out.ids[:, offset] + 1) % 300
            out.ids[:, offset] = torch.where(step.committed_len % 3 == 0, wrong, out.ids[:, offset])

    monkeypatch.setattr(DraftModelProposer, "propose", spoil)
    asks = [
        kit.ask(range(20, 27 + index), temperature=temperature, seed=index, max_tokens=200)
        for index in range(2)
    ]
    llm = llm_of(target, target, K, async_scheduling=late)
    outputs = kit.generate(llm, asks)
    assert kit.ids(outputs) == kit.ids(kit.generate(llm_of(target), asks))
    for (prompt, _), output in zip(asks, outputs, strict=True):
        sources = list(output.outputs[0].token_sources)
        assert len(sources) == 200 and sources[0] == "target"
        made = 1  # of the prompt's step
        while made < 200:
            count = next((i for i, s in enumerate(sources[made:]) if s == "target"), 200 - made)
            room = min(K, 200 - made - 1)
            spoiled = offset is not None and (len(prompt) + made) % 3 == 0
            assert count == (min(offset, room) if spoiled else room), made
            made += count + 1
