"""Prompts with images compute what transformers computes, with and without speculation."""

from __future__ import annotations

import pickle

import pytest
import torch
from specdecode import LLM, SamplingParams
from specdecode.testing.ranks import ranks_in_threads
from specdecode.testing.reference import dense_forward
from specdecode.testing.tiny_vision import IMAGE_ID, tiny_image, tiny_vision_checkpoint

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, top_p=0.9, seed=5, max_tokens=24, ignore_eos=True)
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}


def ask(text, *images):
    return {"prompt": text, "multi_modal_data": {"image": list(images)}}


PROMPTS = [
    ask("what is <image> here?", tiny_image(0)),
    {"prompt": "text alone, text alone, text alone"},
    ask("<image>", tiny_image(2)),
    ask("<image> or <image>, or", tiny_image(1), tiny_image(0, 20, 20)),
]


def tokens(llm, prompts=PROMPTS, params=GREEDY):
    return [list(out.outputs[0].token_ids) for out in llm.generate(prompts, params, use_tqdm=False)]


def metric(llm, name):
    return {metric.name: metric.value for metric in llm.get_metrics()}[name]


def encoded(llm):
    return llm.llm_engine.core.runner.images.encoded


@pytest.fixture(scope="module")
def plain(engine):
    """Output of each prompt alone, without cache and chunks."""
    llm = engine(enable_prefix_caching=False)
    return {
        params.seed: [tokens(llm, [prompt], params)[0] for prompt in PROMPTS] for params in (GREEDY, SEEDED)
    }


def test_ids_and_logits_are_those_of_transformers(tmp_path):
    """Of Idefics3, as the first SmolVLM is; the other ones' processor wants packages for videos."""
    import transformers
    from specdecode import LLM

    path = tiny_vision_checkpoint(tmp_path, family="idefics3", seed=3)
    processor = transformers.Idefics3Processor(
        transformers.AutoImageProcessor.from_pretrained(path),
        transformers.AutoTokenizer.from_pretrained(path),
        image_seq_len=4,
    )
    model = transformers.Idefics3ForConditionalGeneration.from_pretrained(path, dtype=torch.float32).eval()
    images, text = [tiny_image(0), tiny_image(1, 33, 70)], "one <image> two\n<image>\nthree"
    wanted = processor(images=[images], text=[text], return_tensors="pt")
    with LLM(str(path), dtype="float32", device="cpu") as llm, torch.inference_mode():
        prompt = llm.llm_engine.prepare(ask(text, *images), GREEDY)
        assert list(prompt.token_ids) == wanted["input_ids"][0].tolist()
        runner = llm.llm_engine.core.runner
        given = runner.images.of_prompt(prompt.images)
        hidden, _ = dense_forward(runner.model, prompt.token_ids, given=given)
        logits = runner.model.compute_logits(hidden)
        theirs = model(**wanted).logits[0]
        torch.testing.assert_close(logits, theirs, atol=1e-4, rtol=1e-4)
        text_only, _ = dense_forward(runner.model, prompt.token_ids)
        assert (runner.model.compute_logits(text_only)[-1] - theirs[-1]).abs().max() > 0.1
        greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        generated = model.generate(
            **wanted, max_new_tokens=8, min_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert tokens(llm, [ask(text, *images)], greedy)[0] == generated[0, len(prompt.token_ids) :].tolist()


def test_logits_of_smolvlm_are_those_of_transformers(engine, smolvlm):
    import transformers

    llm = engine()
    model = transformers.SmolVLMForConditionalGeneration.from_pretrained(smolvlm, dtype=torch.float32).eval()
    prompt = llm.llm_engine.prepare(PROMPTS[0], GREEDY)
    image, runner = prompt.images[0].image, llm.llm_engine.core.runner
    with torch.inference_mode():
        hidden, _ = dense_forward(
            runner.model, prompt.token_ids, given=runner.images.of_prompt(prompt.images)
        )
        theirs = model(
            input_ids=torch.tensor([prompt.token_ids]),
            pixel_values=image.pixels[None],
            pixel_attention_mask=image.mask[None],
        ).logits[0]
        torch.testing.assert_close(runner.model.compute_logits(hidden), theirs, atol=1e-4, rtol=1e-4)


def test_another_image_gives_another_output(engine):
    first, second = tokens(engine(), [ask("<image>", tiny_image(0)), ask("<image>", tiny_image(1))])
    assert first != second


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_num_batched_tokens": 16, "max_num_seqs": 4},  # a chunk ends within an image
        {"async_scheduling": True},
        {"async_scheduling": True, "max_num_batched_tokens": 7, "max_num_seqs": 4},
        {"speculative_config": NGRAM},
        {
            "speculative_config": NGRAM,
            "async_scheduling": True,
            "max_num_batched_tokens": 24,
            "max_num_seqs": 4,
        },
        {"num_gpu_blocks_override": 28, "max_model_len": 216},  # somebody gives way
        {"num_gpu_blocks_override": 28, "max_model_len": 216, "speculative_config": NGRAM},
    ],
    ids=["batch", "chunks", "seats", "seats-chunks", "ngram", "ngram-seats", "preempted", "ngram-preempted"],
)
def test_output_does_not_depend_on_how_it_is_computed(engine, plain, changes, params):
    llm = engine(**changes)
    for _ in range(2):  # the second time behind cached prefixes
        assert tokens(llm, params=params) == plain[params.seed]
    if "num_gpu_blocks_override" in changes:
        assert metric(llm, "vllm:num_preemptions") > 0
    if "speculative_config" in changes and params.greedy:  # it comes to repeat itself
        assert metric(llm, "vllm:spec_decode_num_accepted_tokens") > 0


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_draft_model_that_sees_no_images(engine, plain, draft, params):
    config = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}
    llm = engine(speculative_config=config, max_num_batched_tokens=32, max_num_seqs=4)
    for _ in range(2):
        assert tokens(llm, params=params) == plain[params.seed]
    if params.greedy:
        assert metric(llm, "vllm:spec_decode_num_accepted_tokens") > 0


def test_bfloat16_is_exact_with_images_too(engine):
    alone = engine(dtype="bfloat16", enable_prefix_caching=False)
    wanted = [tokens(alone, [prompt])[0] for prompt in PROMPTS]
    assert tokens(engine(dtype="bfloat16", speculative_config=NGRAM, max_num_batched_tokens=64)) == wanted


def test_the_fused_forward_takes_images(smolvlm, plain, monkeypatch):
    """On the torch references of its kernels."""
    from specdecode import LLM

    monkeypatch.setenv("SPECDECODE_FUSED", "1")
    with LLM(str(smolvlm), dtype="float32", device="cpu", max_num_batched_tokens=64) as llm:
        assert llm.llm_engine.core.runner.model.fused
        prompt = llm.llm_engine.prepare(PROMPTS[0], GREEDY)
        runner = llm.llm_engine.core.runner
        given = runner.images.of_prompt(prompt.images)
        fused, _ = dense_forward(runner.model, prompt.token_ids, given=given)
        runner.model.fused = False
        layers, _ = dense_forward(runner.model, prompt.token_ids, given=given)
        torch.testing.assert_close(fused, layers, atol=1e-4, rtol=1e-4)
        runner.model.fused = True
        assert tokens(llm)[0] == plain[None][0]


def test_a_prompt_with_images_travels_between_processes(engine):
    llm = engine()
    prompt = llm.llm_engine.prepare(PROMPTS[0], GREEDY)
    copy = pickle.loads(pickle.dumps(prompt))
    assert copy.images[0].image.key == prompt.images[0].image.key
    assert tokens(llm, [PROMPTS[0]]) == [_generate(llm, copy)]


def _generate(llm, prompt):
    llm.llm_engine.add_request("copied", prompt, GREEDY)
    outputs = []
    while llm.llm_engine.has_unfinished_requests():
        outputs += llm.llm_engine.step()
    return list(outputs[-1].outputs[0].token_ids)


@pytest.mark.parametrize("fused", ["0", "1"])
@pytest.mark.parametrize("speculation", [None, NGRAM])
def test_ranks_that_share_out_the_text_model(smolvlm, plain, monkeypatch, speculation, fused):
    """Each has the tower whole, and cuts prompts within images where the others do."""
    monkeypatch.setenv("SPECDECODE_FUSED", fused)
    with ranks_in_threads():
        options = {"speculative_config": speculation, "max_num_batched_tokens": 24, "max_num_seqs": 8}
        llm = LLM(
            str(smolvlm), dtype="float32", device="cpu", block_size=8, tensor_parallel_size=2, **options
        )
        for params in (GREEDY, SEEDED):
            assert tokens(llm, params=params) == plain[params.seed]
            assert tokens(llm, params=params) == plain[params.seed]  # from what is cached
        llm.shutdown()


def test_an_image_is_cached_by_its_content(engine):
    llm = engine(max_num_seqs=2)
    first, other = ask("<image> ok", tiny_image(7)), ask("<image> ok", tiny_image(8))

    def cached(prompt):
        return llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens

    length = len(llm.llm_engine.prepare(first, GREEDY).token_ids)
    assert cached(first) == 0 and encoded(llm) == 1
    whole = cached(first)
    assert length - 8 <= whole < length and encoded(llm) == 1
    before = cached(other)  # up to the block in which the first placeholder is
    assert before <= llm.llm_engine.prepare(first, GREEDY).token_ids.index(IMAGE_ID) and encoded(llm) == 2
    assert cached(other) == whole and encoded(llm) == 2
    assert llm.reset_prefix_cache()
    assert cached(first) == 0 and encoded(llm) == 2  # its vectors are still there


def test_vectors_that_were_dropped_are_computed_again(engine, plain):
    llm = engine(max_num_seqs=2, enable_prefix_caching=False)
    images = llm.llm_engine.core.runner.images
    images._most = 1  # so that one image is kept
    for _ in range(2):
        assert tokens(llm) == plain[None]
    assert len(images._kept) == 1 and images.encoded > 4


def test_ids_with_a_placeholder_and_several_completions(engine):
    llm = engine()
    ids = llm.get_tokenizer()("see <image>").input_ids
    assert ids.count(IMAGE_ID) == 1
    prompt = {"prompt_token_ids": ids, "multi_modal_data": {"image": tiny_image(3)}}
    params = SEEDED.clone(n=2)
    by_ids, by_text = llm.generate([prompt, ask("see <image>", tiny_image(3))], params, use_tqdm=False)
    for one, other in zip(by_ids.outputs, by_text.outputs, strict=True):
        assert one.token_ids == other.token_ids
    assert by_ids.outputs[0].token_ids != by_ids.outputs[1].token_ids


def test_shadow_checks_agree(engine):
    llm = engine(speculative_config=NGRAM, shadow_rate=1.0)
    tokens(llm)
    assert metric(llm, "specdecode:shadow_checked") == len(PROMPTS)
    assert all(m.value == 0 for m in llm.get_metrics() if m.name == "specdecode:shadow_mismatches")


def test_prompt_logprobs_of_an_image(engine):
    llm = engine()
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    output = llm.generate(PROMPTS[0], params, use_tqdm=False)[0]
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
