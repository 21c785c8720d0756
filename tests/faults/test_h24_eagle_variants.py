"""H24: a head with and without tables of its own loads and drafts alike; what it lacks is named.

That its logits are those of the formulas is ``plugins/eagle/tests/test_eagle_layouts.py``.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

testing = pytest.importorskip("specdec_eagle.testing")

VOCAB, KEPT = 320, 40
AUX = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    from specdecode.testing.tiny import tiny_checkpoint

    path = tmp_path_factory.mktemp("h24") / "target"
    return tiny_checkpoint(path, vocab_size=VOCAB, output_scale=0.2)


def config(head, method="eagle3", **keys):
    return {"method": method, "model": str(head), "num_speculative_tokens": 3, **keys}


def drafts_of(engine):
    return [(record.history, record.ids) for record in engine.recording.drafts if record.ids]


@pytest.mark.parametrize("layout", ["eagle", "eagle3"])
@pytest.mark.parametrize(("embed", "lm_head", "tied"), list(itertools.product((False, True), repeat=3)))
def test_h24_with_and_without_tables_of_its_own(
    faults, same, target, tmp_path, monkeypatch, layout, embed, lm_head, tied
):
    """The tied flag of a head's config says nothing: its tensors do."""
    import torch
    from specdec_eagle import loading

    made, load = [], loading.load_head

    def note(*args):
        made.append(load(*args))
        return made[-1]

    monkeypatch.setattr("specdec_eagle.proposer.load_head", note)
    layers = AUX if layout == "eagle3" else {}
    head = testing.write_head(
        tmp_path / "head", layout, target, embed=embed, lm_head=lm_head, tie_word_embeddings=tied, **layers
    )
    asks = [faults.ask(range(9, 15 + i), max_tokens=16, ignore_eos=True) for i in range(3)]
    base = faults.engine(model=str(target)).generate(asks)
    drafts = []
    for _ in range(2):
        engine = faults.engine(config(head, layout), model=str(target))
        same(engine.generate(asks), base)
        drafts.append(drafts_of(engine))
    assert drafts[0] == drafts[1] and len(drafts[0]) > 10
    one, two = made
    assert one.state_dict().keys() == two.state_dict().keys()
    assert all(torch.equal(t, two.state_dict()[name]) for name, t in one.state_dict().items())
    assert (one.lm_head is not None) is lm_head
    # EAGLE's table is a copy of the target's: that is used, and the copy dropped.
    assert (one.embed_tokens is not None) is (embed and layout == "eagle3")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"drop": ("midlayer.self_attn.q_proj.weight",)}, "lacks 1 tensors .*self_attn.q_proj.weight"),
        ({"hidden_size": 48}, "hidden size 48, the target 64"),
        ({"draft_vocab": KEPT, "drop": ("d2t", "t2d")}, f"draft vocabulary of {KEPT} of {VOCAB} and no map"),
        ({"draft_vocab": KEPT, "outside": True}, f"d2t maps draft id {KEPT - 1} to {VOCAB}, outside"),
    ],
)
def test_h24_what_is_missing_is_named_before_the_target_is_loaded(
    faults, target, tmp_path, monkeypatch, options, said
):
    import torch
    from specdecode import models

    options = dict(options)
    if options.pop("outside", False):
        offsets = torch.zeros(KEPT, dtype=torch.int64)
        offsets[-1] = VOCAB - KEPT + 1
        options["tensors"] = {"d2t": offsets}
    head = testing.write_head(tmp_path / "head", "eagle3", target, **AUX, **options)
    monkeypatch.setattr(models, "load_model", lambda *_, **__: pytest.fail("weights were loaded"))
    with pytest.raises(ValueError, match=said):
        faults.engine(config(head), model=str(target), recorded=False)


def test_h24_a_reduced_vocabulary_is_the_offsets_and_equal_sizes_the_identity(faults, same, target, tmp_path):
    from safetensors.torch import load_file

    asks = [faults.ask(range(9, 15 + i), max_tokens=24, ignore_eos=True) for i in range(3)]
    base = faults.engine(model=str(target)).generate(asks)
    for name, size in (("reduced", KEPT), ("whole", None)):
        head = testing.write_head(tmp_path / name, "eagle3", target, draft_vocab=size, **AUX)
        engine = faults.engine(config(head), model=str(target))
        same(engine.generate(asks), base)
        drafted = {token for record in engine.recording.drafts for token in record.ids}
        stored = load_file(head / "model.safetensors")
        assert ("d2t" in stored) is (size is not None)
        if size is None:
            assert engine.accepted > 0
        else:
            mapped = set((np.arange(size) + stored["d2t"].numpy()).tolist())
            assert len(mapped) == size and drafted and drafted <= mapped


@pytest.mark.parametrize(
    "shape", [{}, {"speculative_token_tree": "[(0,), (1,), (0, 0)]"}], ids=["chain", "tree"]
)
def test_h24_the_law_of_a_reduced_vocabulary(faults, fault_lab, tmp_path, shape):
    """At temperature 1, under the rule that weighs what the head tells: half of 16 tokens can be drafted."""
    import torch
    from specdecode.testing.laws import assert_law

    size = 16
    logits = torch.randn(size, size, generator=torch.Generator().manual_seed(8)) * 1.5
    table = fault_lab.table(logits)
    head = testing.write_head(tmp_path / "head", "eagle3", table, draft_vocab=size // 2, **AUX)
    engine = faults.engine(
        config(head, rejection_sample_method="standard", **shape), model=table, recorded=False
    )
    asks = [
        faults.ask([3 + i % 5, i % size], temperature=1.0, seed=i, max_tokens=100, ignore_eos=True)
        for i in range(48)
    ]
    law = logits.double().softmax(-1).numpy()
    drawn = {}
    for ask, output in zip(asks, engine.generate(asks), strict=True):
        (completion,) = output.outputs
        last, offset = ask.prompt[-1], 0
        for token, source in zip(completion.token_ids, completion.token_sources, strict=True):
            drawn.setdefault((offset, last), []).append(token)
            last, offset = token, 0 if source == "target" else offset + 1
    assert {offset for offset, _ in drawn} >= {0, 1, 2}
    for (_, last), tokens in drawn.items():
        assert_law(np.array(tokens), law[last])
    assert engine.accepted > 100 and not engine.metric("specdecode:drafts_dropped_by_fault")
