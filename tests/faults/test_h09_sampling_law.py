"""H09: drafts are judged against the target's law after temperature, top_k and top_p.

Under the default rule, ``invariant``. The target is a table, so each token's law is known. Draws of
many laws are made comparable by the randomised probability integral transform: ``F(x-) + v p(x)``, with
``v`` uniform, is uniform for a draw ``x`` of the law ``p``, and for no other law in all bins.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

VOCAB = 12
K = 4
LENGTH = 120
BINS = 20
FILTERS = ({}, {"top_k": 3}, {"top_p": 0.7}, {"top_k": 3, "top_p": 0.7})
LAWS = [{"temperature": t, **kept} for t, kept in itertools.product((0.5, 1.0, 2.0), FILTERS)]


def filtered(logits, temperature, top_k=0, top_p=1.0):
    """``[V]`` probabilities of ``logits`` ``[V]``, written out anew."""
    scaled = logits / temperature
    if top_k:
        scaled = np.where(scaled >= np.sort(scaled)[-top_k], scaled, -np.inf)
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    order = np.argsort(-probs)
    before = np.concatenate(([0.0], probs[order].cumsum()[:-1]))
    kept = np.zeros(len(probs))
    kept[order] = np.where(before < top_p, probs[order], 0.0)
    return kept / kept.sum()


@pytest.fixture(scope="module")
def logits():
    import torch

    return torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(5)) * 1.5


@pytest.fixture(scope="module")
def table(fault_lab, logits):
    return fault_lab.table(logits)


def _configs(logits):
    """A drafter with dice and a temperature of its own, one with the target's noise, and one without."""
    return {
        "gambler": {
            "method": "faults-gambler",
            "num_speculative_tokens": K,
            "law": logits.tolist(),
            "temperature": 1.4,
        },
        "self-draft": {"method": "scripted-self-draft", "num_speculative_tokens": K},
        "ngram": {
            "method": "ngram",
            "num_speculative_tokens": K,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 2,
        },
    }


def _slots(sources):
    """For each token its slot in its block: 0..K-1 those of drafts, K the bonus."""
    slot = 0
    for source in sources:
        yield slot
        slot = slot + 1 if source == "draft" else 0


@pytest.mark.parametrize(
    ("drafter", "n", "least"), [("self-draft", 14, 3800), ("gambler", 10, 100), ("ngram", 6, 20)]
)
def test_h09_the_filtered_law_at_every_offset(faults, logits, table, drafter, n, least):
    """One mixed batch of all laws: at each offset and in the bonus slot, and for each row's own parameters.

    ``least`` is how many draws each slot has to have: the drafter with the target's noise is always
    right, so that there are as many in the last slot as in the first.
    """
    from specdecode.testing.laws import assert_law

    engine = faults.engine(
        _configs(logits)[drafter],
        model=table,
        recorded=False,
        skip_tokenizer_init=True,
        max_num_seqs=128,
        max_num_batched_tokens=2048,
        num_gpu_blocks_override=6000,
    )
    asks = [
        faults.ask([5, 7, 5], n=n, seed=index, max_tokens=LENGTH, ignore_eos=True, **law)
        for index, law in enumerate(LAWS)
    ]
    dice = np.random.default_rng(1)
    by_slot = [[] for _ in range(K + 1)]
    by_law = []
    for ask, law, output in zip(asks, LAWS, engine.generate(asks), strict=True):
        exact = np.stack([filtered(row, **law) for row in logits.double().numpy()])
        starts = np.concatenate((np.zeros((VOCAB, 1)), exact.cumsum(-1)), axis=-1)
        places = []
        for completion in output.outputs:
            ids = np.array(completion.token_ids)
            last = np.concatenate((ask.prompt[-1:], ids[:-1]))
            assert (exact[last, ids] > 0).all(), f"{law}: a token outside the filter"
            place = starts[last, ids] + dice.random(len(ids)) * exact[last, ids]
            places.append(np.minimum((place * BINS).astype(int), BINS - 1))
            for slot, where in zip(_slots(completion.token_sources), places[-1], strict=True):
                by_slot[slot].append(where)
        by_law.append(np.concatenate(places))
    uniform = np.full(BINS, 1 / BINS)
    for draws in by_slot:
        assert len(draws) >= least
        assert_law(draws, uniform)
    for draws in by_law:
        assert_law(draws, uniform)


def test_h09_unfiltered_judgement_would_be_seen(logits):
    """A verifier that forgets the temperature fails the test above."""
    from specdecode.testing.laws import assert_law

    dice = np.random.default_rng(2)
    row = logits[5].double().numpy()
    right, wrong = filtered(row, 0.5), filtered(row, 1.0)
    draws = dice.choice(VOCAB, 20_000, p=wrong)
    starts = np.concatenate(([0.0], right.cumsum()))
    places = np.minimum(((starts[draws] + dice.random(20_000) * right[draws]) * BINS).astype(int), BINS - 1)
    with pytest.raises(AssertionError, match="wrong law"):
        assert_law(places, np.full(BINS, 1 / BINS))
