"""Adapters in captured steps on a card: the same tokens alone and in any batch, in whichever slot."""

from __future__ import annotations

import pytest
import torch
from specdecode.testing.adapters import AdapterLab
from specdecode.testing.tiny import tiny_checkpoint

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def card(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("card")
    target = tiny_checkpoint(folder / "target", hidden_size=128, head_dim=32, output_scale=0.5)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SPECDECODE_CHECK_WRITES", raising=False)  # what looks at a step is not captured
        lab = AdapterLab(folder, target, device="cuda", dtype=request.param, gpu_memory_utilization=0.5)
        yield lab
        lab.close()


@pytest.mark.parametrize("config", [None, NGRAM], ids=["plain", "ngram"])
@pytest.mark.parametrize("slots", [1, 3])
def test_in_a_batch_and_alone(card, config, slots):
    prompts, params = card.asks(max_tokens=24)
    with card.engine(max_loras=slots, speculative_config=config) as llm:
        assert llm.llm_engine.core.steady.captured
        together = card.generate(llm, prompts, params)
        for index, kind in enumerate(card.MIXED):
            alone = card.generate(llm, prompts[index : index + 1], params[index], [kind])
            assert alone == [together[index]]
        plain = card.generate(llm, prompts, params, [None] * 8)
    assert [a != b for a, b in zip(plain, together, strict=True)] == [kind is not None for kind in card.MIXED]
    without = [kind for kind in card.MIXED if kind is None]
    rows = [index for index, kind in enumerate(card.MIXED) if kind is None]
    own = [prompts[row] for row in rows], [params[row] for row in rows], [together[row] for row in rows]
    card.check(*own, kinds=without)  # the bits of an engine without room
    if str(llm.llm_engine.target.dtype) == "float32":
        card.check(prompts, params, together)
