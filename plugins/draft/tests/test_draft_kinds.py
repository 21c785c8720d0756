"""Drafts of a shorter context, of scaled positions, of other precisions, formats and architectures."""

import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from specdecode.testing.tiny import tiny_checkpoint

both_orders = pytest.mark.parametrize("late", [False, True], ids=["plain", "late"])


def share(llm, kit):
    """Accepted by drafted."""
    drafted = kit.metric(llm, "vllm:spec_decode_num_draft_tokens")
    return kit.metric(llm, "vllm:spec_decode_num_accepted_tokens") / drafted


@both_orders
@pytest.mark.parametrize("said_by", ["checkpoint", "user"])
def test_a_shorter_context_ends_the_drafts_of_long_texts_only(
    kit, llm_of, target, tmp_path, caplog, monkeypatch, late, said_by
):
    """Fault H14: a limit of 16 beside the target's 64."""
    from specdec_draft.proposer import DraftModelProposer

    propose, seen = DraftModelProposer.propose, []

    def note(self, step, out):
        propose(self, step, out)
        seen.extend(zip(step.committed_len.tolist(), out.lens.tolist(), strict=True))

    monkeypatch.setattr(DraftModelProposer, "propose", note)
    own = Path(shutil.copytree(target, tmp_path / "short"))
    if said_by == "checkpoint":
        kit.edit(own, max_position_embeddings=16)
    spec = {"max_model_len": 16} if said_by == "user" else None
    asks = [kit.ask(range(9, 14), temperature=0, max_tokens=count) for count in (45, 8)]
    asks.append(kit.ask(range(9, 40), temperature=1.0, seed=3, max_tokens=20))  # its prompt is longer
    with caplog.at_level(logging.WARNING, "specdec_draft"):
        llm = llm_of(target, own, spec=spec, async_scheduling=late, max_model_len=64)
        outputs = kit.generate(llm, asks)
    assert kit.ids(outputs) == kit.ids(kit.generate(llm_of(target, max_model_len=64), asks))
    assert all(not lens or committed + lens <= 16 for committed, lens in seen)
    assert sum(record.name.startswith("specdec_draft") for record in caplog.records) == 1
    assert outputs[0].metrics.accepted == outputs[0].metrics.drafted > 0
    assert outputs[1].metrics.drafted > 0 and outputs[2].metrics.drafted == 0
    (again,) = kit.generate(llm, [kit.ask(range(50, 55), temperature=0, max_tokens=8)])
    assert again.metrics.accepted == again.metrics.drafted > 0


@both_orders
def test_a_text_far_beyond_the_drafts_table_of_positions(kit, llm_of, tmp_path, late):
    own = tiny_checkpoint(tmp_path / "long", output_scale=0.5, max_position_embeddings=2048)
    asks = [kit.ask([3 + i % 290 for i in range(size)], temperature=0, max_tokens=12) for size in (1300, 5)]
    llm = llm_of(own, own, spec={"max_model_len": 32}, async_scheduling=late, max_model_len=2048)
    long, short = kit.generate(llm, asks)
    assert long.metrics.drafted == 0 and short.metrics.accepted == short.metrics.drafted > 0


@both_orders
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
        {
            "rope_type": "llama3", "factor": 8.0, "rope_theta": 10000.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
        },
    ],
    ids=["linear", "llama3"],
)  # fmt: skip
def test_scaled_positions_from_the_first_to_the_last(kit, llm_of, tmp_path, late, rope):
    """Fault H25: a copy of the target is right at every length."""
    length = 64 if rope["rope_type"] == "linear" else 256
    own = tiny_checkpoint(
        tmp_path / "a", output_scale=0.5, max_position_embeddings=length, rope_parameters=rope
    )
    other = Path(shutil.copytree(own, tmp_path / "b"))
    asks = [kit.ask([40], temperature=t, seed=1, max_tokens=255) for t in (0, 1.0)]
    llm = llm_of(own, other, async_scheduling=late)
    for output in kit.generate(llm, asks):
        assert len(output.outputs[0].token_ids) == 255
        assert output.metrics.accepted == output.metrics.drafted > 190


@both_orders
def test_a_draft_in_int8_and_one_in_another_dtype(kit, llm_of, target, tmp_path, late):
    """The draft's KV has its own dtype; the copies disagree in close calls only."""
    asks = [kit.ask(range(9, 14 + i), temperature=t, seed=i, max_tokens=60) for i, t in enumerate((0, 1.0))]
    want = kit.ids(kit.generate(llm_of(target), asks))
    for spec in ({"quantization": "int8"}, {"dtype": "bfloat16"}):
        llm = llm_of(target, target, spec=spec, async_scheduling=late)
        assert kit.ids(kit.generate(llm, asks)) == want
        assert share(llm, kit) > 0.7


def test_a_model_of_transformers_drafts(kit, llm_of, target, tmp_path):
    """GPT-NeoX, which is no native family."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    torch.manual_seed(0)
    config = GPTNeoXConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=128,
    )  # fmt: skip
    GPTNeoXForCausalLM(config).save_pretrained(tmp_path)
    shutil.copy(target / "tokenizer.json", tmp_path)
    asks = [kit.ask(range(9, 14), temperature=t, seed=1, max_tokens=150) for t in (0, 1.0)]
    llm = llm_of(target, tmp_path)
    outputs = kit.generate(llm, asks)
    assert kit.ids(outputs) == kit.ids(kit.generate(llm_of(target), asks))
    assert all(output.metrics.drafted > 100 for output in outputs)


@both_orders
def test_a_quantised_gguf_file_drafts_for_its_original(kit, llm_of, target, tmp_path, monkeypatch, late):
    gguf = pytest.importorskip("gguf", reason="GGUF needs the extra specdec-core[gguf]")
    monkeypatch.setenv("SPECDECODE_CACHE", str(tmp_path / "cache"))
    files = [write_gguf(gguf, target, tmp_path / f"{kind}.gguf", kind) for kind in ("F32", "Q8_0")]
    asks = [kit.ask(range(9, 14), temperature=t, seed=1, max_tokens=80) for t in (0, 1.0)]
    llm = llm_of(*files, async_scheduling=late)
    assert kit.ids(kit.generate(llm, asks)) == kit.ids(kit.generate(llm_of(files[0]), asks))
    assert share(llm, kit) > 0.7


def write_gguf(gguf, checkpoint, file, kind):
    """The tiny llama as llama.cpp writes it, its matrices as ``kind``."""
    from safetensors.torch import load_file
    from specdecode.models import load_tokenizer, resolve_model

    model = resolve_model(checkpoint)
    config = model.hf_config
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    tokens = load_tokenizer(model).convert_ids_to_tokens(list(range(config.vocab_size)))
    tokens[-2:] = ["ll", "He"]  # some readers want two merges at least
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (config.vocab_size - 3))
    writer.add_token_merges(["H e", "l l"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        array = tensor.numpy()
        for module, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if module in name:  # llama.cpp rotates neighbouring pairs
                array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        stored = gguf.GGMLQuantizationType[kind if array.ndim == 2 else "F32"]
        data = gguf.quants.quantize(np.ascontiguousarray(array), stored)
        writer.add_tensor(names.get_name(name.removesuffix(".weight")) + ".weight", data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
