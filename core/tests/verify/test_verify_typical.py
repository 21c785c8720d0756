"""Typical acceptance: which drafts it keeps, which path of a tree, and that its results are marked."""

from __future__ import annotations

import logging
import math

import attrs
import pytest
import torch
from specdecode import LLM, SamplingParams
from specdecode.contract import Unsupported
from specdecode.sampling.streams import Stream
from specdecode.testing import scripted
from specdecode.testing.tiny import table_logits, tiny_checkpoint
from specdecode.verify import Typical, WeighedDrafts, rule

V = 12


def drafts_of(ids, parents, laws):
    """``laws[row][node + 1]``: the law behind a node; counts which were asked for."""
    asked = []

    def law(rows, nodes):
        asked.extend(zip(rows, nodes, strict=True))
        return torch.stack([laws[row][node + 1] for row, node in zip(rows, nodes, strict=True)])

    width = max(map(len, ids))
    chances = torch.zeros(len(ids), width)
    none = [None] * len(ids)
    return WeighedDrafts(ids=ids, parents=parents, probs=none, chances=chances, law=law), asked


def keeps(typical, law, token):
    """The formula, in float64."""
    p = law.double().tolist()
    entropy = -math.fsum(x * math.log(x + 1e-5) for x in p)
    return p[token] > min(typical.threshold, typical.alpha * math.exp(-entropy))


def brute(typical, ids, parents, laws):
    """All paths of kept nodes; the longest, the likeliest of those, the first."""
    paths = {(): 0.0}
    for node, (token, parent) in enumerate(zip(ids, parents, strict=True)):
        above = next((p for p in paths if (p[-1] if p else -1) == parent), None)
        if above is not None and keeps(typical, laws[parent + 1], token):
            paths[(*above, node)] = paths[above] + math.log(float(laws[parent + 1][token]))
    return max(paths, key=lambda path: (len(path), paths[path]))


@pytest.mark.parametrize("typical", [Typical(), Typical(0.3, 0.9), Typical(1.0, 0.05)])
def test_the_longest_path_of_kept_drafts(typical):
    generator = torch.Generator().manual_seed(0)
    rows, lengths = 40, []
    parents = [[-1, -1, 0, 0, 1, 2, 4][: 1 + row % 7] for row in range(rows)]
    ids = [torch.randint(V, (len(own),), generator=generator).tolist() for own in parents]
    laws = [
        (torch.randn(len(own) + 1, V, generator=generator) * (row % 4)).softmax(-1)
        for row, own in enumerate(parents)
    ]
    weighed = typical.weigh(drafts_of(ids, parents, laws)[0])
    for row in range(rows):
        wanted = brute(typical, ids[row], parents[row], laws[row])
        assert weighed.accepted[row] == wanted
        last = wanted[-1] if wanted else -1
        assert torch.equal(weighed.left[row], laws[row][last + 1])
        lengths.append(len(wanted))
    assert len(set(lengths)) > 2
    # One row beside others is what it is alone.
    alone = typical.weigh(drafts_of(ids[6:7], parents[6:7], laws[6:7])[0])
    assert alone.accepted == weighed.accepted[6:7]


def test_in_order_laws_are_asked_for_down_the_path_alone():
    sure = torch.full((V,), 0.01 / (V - 1)).index_fill_(0, torch.tensor([3]), 0.99)
    law = [sure] * 5
    drafts, asked = drafts_of([[5, 3, 3, 7]], [[-1, -1, 1, 2]], [law])
    weighed = Typical().weigh_in_order(drafts)
    assert weighed.accepted == [(1, 2)]  # 5 and 7 are unlikely
    assert asked == [(0, -1), (0, 1), (0, 2)]
    assert Typical().weigh(drafts_of([[5, 3, 3, 7]], [[-1, -1, 1, 2]], [law])[0]).accepted == [(1, 2)]


def test_less_is_asked_for_where_the_law_is_flat():
    flat = torch.full((1, V), 1 / V)
    peaked = torch.full((1, V), 0.09 / (V - 1)).index_fill_(1, torch.tensor([3]), 0.91)
    token = torch.tensor([[7]])
    assert Typical().keeps(flat, token)[0].item() and not Typical().keeps(peaked, token)[0].item()
    nothing = torch.zeros(1, V)  # where no token can be drawn
    assert not Typical().keeps(nothing, token)[0].item()


def test_the_rule():
    typical = rule("typical", typical=Typical(0.5, 0.5))
    assert not typical.lossless and typical.trees and typical.mark == "typical"
    assert typical.stream(Stream.DRAFT, 5) == Stream.TARGET  # drafters share the target's noise


# -- in the engine ---------------------------------------------------------------------------------
TYPICAL = {"rejection_sample_method": "typical"}
PARAMS = SamplingParams(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    torch.set_num_threads(1)
    scripted.install()
    path = tmp_path_factory.mktemp("tiny")
    return str(tiny_checkpoint(path, zero_outputs=True, lm_head_scale=4.0))


def texts(llm, params):
    prompts = [{"prompt_token_ids": [60, 61, 62 + row]} for row in range(4)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return outputs, [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("tree", [None, [[0], [1], [0, 0], [1, 0]]])
@pytest.mark.parametrize("late", [False, True])
def test_accepted_drafts_are_typical_and_the_run_says_so(checkpoint, caplog, late, tree):
    config = {"method": "scripted-eagle", "num_speculative_tokens": 4} | TYPICAL | {"posterior_alpha": 0.2}
    config |= {"tree": tree} if tree else {}
    greedy = attrs.evolve(PARAMS, temperature=0.0)
    with LLM(checkpoint, dtype="float32") as llm:
        plain, plain_greedy = texts(llm, PARAMS)[1], texts(llm, greedy)[1]
    with caplog.at_level(logging.WARNING, logger="specdecode"):
        llm = LLM(checkpoint, dtype="float32", speculative_config=config, async_scheduling=late)
    assert "likely enough: the output has not its law" in caplog.text
    with llm:
        outputs, drafted = texts(llm, PARAMS)
        assert texts(llm, greedy)[1] == plain_greedy  # by equality
        assert texts(llm, PARAMS)[1] == drafted
        labels = {metric.name: metric.labels for metric in llm.get_metrics()}
    assert drafted != plain
    typical, laws = Typical(alpha=0.2), table_logits(checkpoint).softmax(-1)
    accepted = 0
    for output in outputs:
        assert output.metrics.lossy == "typical" and not output.metrics.synthetic
        text = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        for place, source in enumerate(output.outputs[0].token_sources):
            if source == "draft":
                before, token = text[2 + place], text[3 + place]
                assert keeps(typical, laws[before], token)
                accepted += 1
    assert accepted > 10
    assert labels["vllm:spec_decode_num_accepted_tokens"] == {"acceptance": "typical"}


def test_what_parameters_exclude_is_not_accepted(checkpoint):
    config = {"method": "scripted-eagle", "num_speculative_tokens": 3} | TYPICAL
    params = attrs.evolve(PARAMS, structured_outputs={"regex": "[ab]{30}"})
    with LLM(checkpoint, dtype="float32", speculative_config=config) as llm:
        (output,) = llm.generate([{"prompt_token_ids": [60]}], params, use_tqdm=False)
    assert set(output.outputs[0].text) <= {"a", "b"} and len(output.outputs[0].text) == 30


def test_shadowing_is_refused(checkpoint):
    config = {"method": "scripted-eagle", "num_speculative_tokens": 3} | TYPICAL
    with pytest.raises(Unsupported, match="does not keep equal: use 'invariant'"):
        LLM(checkpoint, dtype="float32", speculative_config=config, shadow_rate=0.5)
