"""Images on a card: transformers' logits, and the same tokens alone, in batches and with graphs."""

from __future__ import annotations

import pytest
import torch
from specdecode import LLM, SamplingParams
from specdecode.testing.reference import dense_forward
from specdecode.testing.tiny_vision import tiny_image, tiny_vision_checkpoint

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
TEXTS = ["what is <image> here?", "text alone, text alone", "<image>", "<image> or <image>"]
IMAGES = [[tiny_image(0)], [], [tiny_image(2)], [tiny_image(1), tiny_image(0, 20, 20)]]
PROMPTS = [
    {"prompt": text, "multi_modal_data": {"image": images}} if images else {"prompt": text}
    for text, images in zip(TEXTS, IMAGES, strict=True)
]
PARAMS = [
    SamplingParams(temperature=temperature, seed=3, max_tokens=24, ignore_eos=True)
    for temperature in (0.0, 0.0, 1.0, 0.8)
]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(
        tiny_vision_checkpoint(tmp_path_factory.mktemp("card") / "tiny", hidden_size=128, output_scale=0.5)
    )


@pytest.fixture
def card(path, monkeypatch):
    monkeypatch.delenv("SPECDECODE_CHECK_WRITES", raising=False)  # what looks at a step is not captured

    def make(**changes):
        return LLM(path, device="cuda", gpu_memory_utilization=0.3, num_gpu_blocks_override=256, **changes)

    return make


def tokens(llm, prompts, params):
    return [list(out.outputs[0].token_ids) for out in llm.generate(prompts, params, use_tqdm=False)]


def test_logits_are_those_of_transformers(card, path, monkeypatch):
    import transformers

    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    model = transformers.SmolVLMForConditionalGeneration.from_pretrained(path, dtype=torch.float32).eval()
    with card(dtype="float32") as llm, torch.inference_mode():
        assert llm.memory_plan().image_bytes > 0
        runner = llm.llm_engine.core.runner
        prompt = llm.llm_engine.prepare(PROMPTS[0], PARAMS[0])
        given = runner.images.of_prompt(prompt.images)
        hidden, _ = dense_forward(runner.model, prompt.token_ids, given=given)
        image = prompt.images[0].image
        theirs = model(
            input_ids=torch.tensor([prompt.token_ids]),
            pixel_values=image.pixels[None],
            pixel_attention_mask=image.mask[None],
        ).logits[0]
        torch.testing.assert_close(runner.model.compute_logits(hidden).cpu(), theirs, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_alone_in_batches_in_chunks_and_with_graphs(card, dtype):
    with card(dtype=dtype, enforce_eager=True, enable_prefix_caching=False, async_scheduling=False) as llm:
        wanted = [tokens(llm, [p], [q])[0] for p, q in zip(PROMPTS, PARAMS, strict=True)]
    for changes in (
        {},
        {"speculative_config": NGRAM},
        {"speculative_config": NGRAM, "max_num_batched_tokens": 24, "max_num_seqs": 4},
    ):
        with card(dtype=dtype, **changes) as llm:
            assert llm.llm_engine.core.steady.captured
            for _ in range(2):
                assert tokens(llm, PROMPTS, PARAMS) == wanted
