"""`standard` and `block` with the noise they run on: the law at each draft offset and in the bonus slot.

The target is a table, the law of the next token given the last one; the drafter has another, and
samples under the target's parameters. 20,000 requests, told apart by their seed, run some steps; given
that a slot is reached, its token must have the target's law after the token before it. What shares
noise that must be independent fails the same check.
"""

import attrs
import numpy as np
import pytest
import torch
from specdec_kernels.noise import uniform
from specdec_kernels.sampling import perturb
from specdecode.sampling import SamplingBatch, Stream, law, laws_in_order, rank
from specdecode.sampling.batch import NoiseKeys, RowValues
from specdecode.testing.laws import assert_law, law_pvalue
from specdecode.verify import RULES, WeighedDrafts

torch.set_num_threads(1)
TRIALS, VOCAB, START, PROMPT_LEN = 20_000, 5, 0, 4
TARGET, DRAFTER = torch.randn(2, VOCAB, VOCAB, generator=torch.Generator().manual_seed(3)) * 1.2
DRAFTER = 0.6 * TARGET + 0.8 * DRAFTER
SEEDS = torch.arange(TRIALS) * 7919 - 5
CHAIN, TREE = (-1, 0, 1), (-1, -1, 0, 1, 0, 2)
#: temperature, top_k, top_p
PARAMS = [(0.5, 0, 1.0), (1.0, 3, 0.9), (2.0, 3, 0.95), (1.0, 0, 0.8)]


def batch(params, position, stream):
    """A row of each of the first trials: drawn at ``position`` ``[N]``, with noise of ``stream`` ``[N]``."""
    temperature, top_k, top_p = params
    rows = len(position)
    return SamplingBatch(
        num_rows=rows,
        vocab_size=VOCAB,
        temperature=torch.full((rows,), temperature),
        top_k=RowValues(None, torch.full((rows,), top_k), top_k) if top_k else None,
        top_p=RowValues(None, torch.full((rows,), top_p)) if top_p < 1 else None,
        noise=NoiseKeys(None, SEEDS[:rows], torch.zeros_like(position), position, stream),
    )


def key(rule, stream, base):
    return torch.tensor([rule.stream(stream, position) for position in base.tolist()])


def depths(parents):
    found = []
    for parent in parents:
        found.append(0 if parent < 0 else found[parent] + 1)
    return found


def draft(rule, params, parents, last, base):
    """Ids ``[TRIALS, n]`` and laws ``[TRIALS, n, V]``, as ``step.sample`` and ``step.probs`` give them."""
    ids = torch.zeros(TRIALS, len(parents), dtype=torch.int64)
    laws = torch.zeros(TRIALS, len(parents), VOCAB)
    stream = key(rule, Stream.DRAFT, base)
    for parent in sorted(set(parents)):
        children = [node for node, above in enumerate(parents) if above == parent]
        logits = DRAFTER[last if parent < 0 else ids[:, parent]]
        rows = batch(params, base + (0 if parent < 0 else depths(parents)[parent] + 1), stream)
        ids[:, children], _ = rank(logits, rows, len(children))
        laws[:, children] = laws_in_order(law(logits, rows), ids[:, children])
    return ids, laws


def one_step(rule, params, parents, last, base, *, chance_stream=Stream.ACCEPT, token_stream=Stream.TARGET):
    """What a step adds to each trial: tokens."""
    ids, laws = draft(rule, params, parents, last, base)
    before = torch.cat((last[:, None], ids), dim=1)
    targets = torch.stack([law(TARGET[own], batch(params, base, base)) for own in before.T], dim=1)
    position = base[:, None] + torch.tensor(depths(parents))
    stream, index = key(rule, chance_stream, base), torch.zeros_like(base)
    chances = torch.cat(
        [
            uniform(SEEDS, index, position[:, node], ids[:, node, None], stream=stream)
            for node in range(len(parents))
        ],
        dim=1,
    )
    result = rule.weigh(
        WeighedDrafts(
            ids=ids.tolist(),
            parents=[parents] * TRIALS,
            probs=list(laws),
            chances=chances,
            law=lambda rows, nodes: targets[list(rows), [node + 1 for node in nodes]],
        )
    )
    position = base + torch.tensor([len(nodes) for nodes in result.accepted])
    stream = key(rule, token_stream, base) if token_stream else torch.zeros_like(base)
    tokens = perturb(result.left.log(), SEEDS, index, position, stream=stream).argmax(-1).tolist()
    return [
        [*(own[node] for node in nodes), token]
        for own, nodes, token in zip(ids.tolist(), result.accepted, tokens, strict=True)
    ]


def run(rule, params, parents, steps, **wrong):
    """The tokens of each step of each trial, behind the token before them."""
    last, base = torch.full((TRIALS,), START), torch.full((TRIALS,), PROMPT_LEN)
    history = []
    for _ in range(steps):
        added = one_step(rule, params, parents, last, base, **wrong)
        history.append([[before, *tokens] for before, tokens in zip(last.tolist(), added, strict=True)])
        last = torch.tensor([tokens[-1] for tokens in added])
        base = base + torch.tensor([len(tokens) for tokens in added])
    return history


def check_slots(history, params):
    """The law of each slot of each step given the token before it; how many slots there were."""
    every = torch.arange(VOCAB)
    want = law(TARGET, batch(params, every, every)).double().numpy()
    reached = set()
    for step, added in enumerate(history):
        for slot in range(max(map(len, added)) - 1):
            pairs = np.array([tokens[slot : slot + 2] for tokens in added if len(tokens) > slot + 1])
            for last in range(VOCAB):
                tokens = pairs[pairs[:, 0] == last, 1]
                if len(tokens) >= 50:
                    assert_law(tokens, want[last] / want[last].sum())
                    reached.add((step, slot))
    return len(reached)


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize(
    ("rule", "parents", "slots"),
    [("standard", CHAIN, 4), ("standard", TREE, 4), ("block", CHAIN, 4)],
    ids=["standard-chain", "standard-tree", "block-chain"],
)
def test_the_law_at_each_offset_and_in_the_bonus_slot(rule, parents, slots, params):
    steps = 2
    assert check_slots(run(RULES[rule], params, parents, steps), params) == slots * steps


def test_siblings_are_drawn_without_replacement():
    ids, laws = draft(RULES["standard"], (1.0, 0, 1.0), TREE, torch.zeros_like(SEEDS), SEEDS * 0 + PROMPT_LEN)
    assert (ids[:, 0] != ids[:, 1]).all() and (laws[:, 1].gather(-1, ids[:, :1]) == 0).all()
    assert_law(ids[:, 0], laws[0, 0].double().numpy() / laws[0, 0].double().sum().item())
    first = int(ids[0, 0])
    second = ids[ids[:, 0] == first, 1]
    assert_law(second, laws[0, 1].double().numpy() / laws[0, 1].double().sum().item())


def test_both_rules_accept_what_their_theory_says():
    """The share of first drafts that standard accepts is 1 - d; block accepts more of the chain."""
    params = (1.0, 0, 1.0)
    p, q = TARGET[START].softmax(-1), DRAFTER[START].softmax(-1)
    share = 1 - float((p - q).abs().sum()) / 2
    accepted = {}
    for name in ("standard", "block"):
        added = run(RULES[name], params, CHAIN, 1)[0]
        accepted[name] = np.array([len(tokens) - 2 for tokens in added])
    first = accepted["standard"] > 0
    assert law_pvalue([int((~first).sum()), int(first.sum())], [1 - share, share]) > 1e-6
    assert accepted["block"].mean() > accepted["standard"].mean() + 0.02


# -- noise that is shared ----------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["standard", "block"])
@pytest.mark.parametrize(
    "shared",
    [{"chance_stream": Stream.DRAFT}, {"token_stream": Stream.DRAFT}],
    ids=["acceptance", "residual"],
)
def test_noise_shared_with_the_drafter_is_caught(name, shared):
    rule = attrs.evolve(RULES[name], keyed_by_base=False)
    with pytest.raises(AssertionError, match="wrong law"):
        check_slots(run(rule, (1.0, 0, 1.0), CHAIN, 1, **shared), (1.0, 0, 1.0))


def test_block_without_the_base_in_its_keys_is_caught():
    """A draft that was looked at and passed over is not as good as new in the next step."""
    rule = attrs.evolve(RULES["block"], keyed_by_base=False)
    with pytest.raises(AssertionError, match="wrong law"):
        check_slots(run(rule, (1.0, 0, 1.0), CHAIN, 3), (1.0, 0, 1.0))
