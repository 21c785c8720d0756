"""Mixtures of experts: every published layout loads, faults are told, and the packed forms say the same."""

from __future__ import annotations

import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from specdecode.contract import ConfigError
from specdecode.layers.experts import ExpertsLinear
from specdecode.layers.packed import Int8Weight
from specdecode.models import load_model, resolve_model, weight_bytes
from specdecode.models.experts import SparseMLP, plain_name, published_name
from specdecode.testing.tiny import tiny_checkpoint

CPU = torch.device("cpu")
MOE = ["qwen3-moe", "mixtral"]


def load(path, dtype=torch.float32, **options):
    return load_model(resolve_model(path), dtype=dtype, device=CPU, max_model_len=64, **options)


def rewrite(path, change):
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("original", [True, False], ids=["as-published", "stacked"])
@pytest.mark.parametrize("family", MOE)
def test_what_transformers_writes_loads(tmp_path, family, original, native, reference, prompt):
    """By default what the authors published; without ``save_original_format`` all experts in one tensor."""
    from transformers import AutoModelForCausalLM

    path = tiny_checkpoint(tmp_path / "published", family)
    AutoModelForCausalLM.from_pretrained(path).save_pretrained(
        tmp_path / "saved", save_original_format=original
    )
    names = set(load_file(tmp_path / "saved/model.safetensors"))
    assert ("model.layers.0.mlp.experts.gate_up_proj" in names) is not original
    ids = prompt(20)
    want = reference(path)(ids).logits[0]
    torch.testing.assert_close(native(tmp_path / "saved").feed({"a": ids})[0]["a"], want, atol=1e-4, rtol=0)


def test_experts_are_stacked_while_they_are_read(tmp_path, monkeypatch):
    """A tensor goes from its file to its place: nothing is held beside the model."""
    monkeypatch.setenv("SPECDECODE_FUSED", "1")  # nothing is packed
    path = tiny_checkpoint(tmp_path, "qwen3-moe", norm_topk_prob=False)
    stored, mlp = load_file(path / "model.safetensors"), load(path).layers[1].mlp
    assert isinstance(mlp, SparseMLP) and not mlp.normalize
    assert mlp.gate_up_proj.weight.shape == (8, 64, 64)
    for expert in range(8):
        prefix = f"model.layers.1.mlp.experts.{expert}."
        gate, up = mlp.gate_up_proj.weight[expert].chunk(2)
        assert torch.equal(gate, stored[prefix + "gate_proj.weight"])
        assert torch.equal(up, stored[prefix + "up_proj.weight"])
        assert torch.equal(mlp.down_proj.weight[expert], stored[prefix + "down_proj.weight"])


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen3-moe", "model.layers.1.mlp.experts.5.up_proj.weight"),
        ("qwen3-moe", "model.layers.0.mlp.gate.weight"),
        ("mixtral", "model.layers.1.block_sparse_moe.experts.3.w2.weight"),
        ("mixtral", "model.layers.0.block_sparse_moe.gate.weight"),
    ],
)
def test_a_missing_tensor_is_named_as_it_was_published(tmp_path, family, name):
    path = tiny_checkpoint(tmp_path, family)
    rewrite(path, lambda tensors: tensors.pop(name))
    with pytest.raises(
        ConfigError, match=re.escape(f"lacks 1 tensors of {resolve_model(path).architecture} ")
    ) as e:
        load(path)
    assert name.removeprefix("model.") in str(e.value)


def test_a_missing_expert_and_a_wrong_shape(tmp_path):
    path = tiny_checkpoint(tmp_path, "qwen3-moe")
    rewrite(
        path, lambda tensors: [tensors.pop(name) for name in list(tensors) if ".1.mlp.experts.7." in name]
    )
    with pytest.raises(ConfigError, match=r"lacks 3 tensors.*layers\.1\.mlp\.experts\.7\.gate_proj"):
        load(path)
    tiny_checkpoint(tmp_path, "qwen3-moe")
    name = "model.layers.0.mlp.experts.2.down_proj.weight"
    rewrite(path, lambda tensors: tensors.update({name: torch.zeros(64, 30)}))
    with pytest.raises(ConfigError, match=rf"{name}.*expected shape \[64, 32\], got \[64, 30\]"):
        load(path)


def test_fewer_experts_than_a_token_takes(tmp_path):
    path = tiny_checkpoint(tmp_path, "mixtral", num_experts_per_tok=5)
    with pytest.raises(ConfigError, match=r"num_experts_per_tok .* between 1 and its 4 experts, got 5"):
        load(path)


def test_names_there_and_back():
    for name in ("layers.0.block_sparse_moe.gate.weight", "layers.3.block_sparse_moe.experts.12.w1.weight"):
        assert published_name(plain_name(name)) == name
    for name in ("layers.0.mlp.gate.weight", "layers.0.mlp.experts.1.up_proj.weight", "norm.weight"):
        assert plain_name(name) == name
    assert published_name("layers.0.self_attn.q_proj.weight") == "layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize("family", MOE)
def test_int8_experts_are_near_those_they_were_made_from(tmp_path, family):
    path = tiny_checkpoint(tmp_path, family)
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact, int8 = (load(path, torch.bfloat16, quantization=q).layers[0].mlp for q in (None, "int8"))
    assert isinstance(int8.gate_up_proj, ExpertsLinear)
    assert int8.gate_up_proj.num_bytes < 0.6 * exact.gate_up_proj.num_bytes
    assert torch.equal(exact.gate(x), int8.gate(x))  # scores are not quantized
    want, got = exact(x).float(), int8(x).float()
    assert (got - want).norm() < 0.05 * want.norm()


def test_bytes_of_all_experts_count(tmp_path, monkeypatch):
    path = tiny_checkpoint(tmp_path, "qwen3-moe", vocab_size=304)  # packed in sixteens
    stored = sum(tensor.nbytes for tensor in load_file(path / "model.safetensors").values())
    assert weight_bytes(load(path)) == stored
    monkeypatch.setenv("SPECDECODE_FUSED", "1")
    assert weight_bytes(load(path)) == stored


def test_layers_that_keep_their_mlp(tmp_path):
    path = tiny_checkpoint(
        tmp_path, "qwen3-moe", num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=[3]
    )
    kinds = [isinstance(layer.mlp, SparseMLP) for layer in load(path).layers]
    assert kinds == [False, True, False, False]


def test_packed_rows_are_those_of_the_reference(tmp_path):
    """The C++ kernels against torch, where experts have no, one and many rows."""
    pack = pytest.importorskip("specdec_kernels.experts")
    generator = torch.Generator().manual_seed(0)
    for size, count in ((64, 1), (40, 2), (33, 3)):
        layer = ExpertsLinear(6, size, {"a": 24, "b": 9}, dtype=torch.float32, device=CPU)
        layer.weight.data.normal_(generator=generator)
        ids = torch.randint(0, 5, (11, count), generator=generator)
        groups = pack.group(ids, 6)
        x = torch.randn(11, size, generator=generator)[groups.tokens]
        want = layer(x, groups)
        for form, near in ((None, 1e-4), (Int8Weight, 0.6)):
            other = ExpertsLinear(6, size, {"a": 24, "b": 9}, dtype=torch.float32, device=CPU)
            other.weight.data.copy_(layer.weight)
            if form is None:
                from specdecode.layers.packed import NativeWeight

                other.pack(NativeWeight)
                got = other(x, groups)
            else:
                other = other.bfloat16()
                other.pack(form)
                got = other(x.bfloat16(), groups).float()
            assert (got - want).abs().max() < near
        weights = torch.rand(11, count, generator=generator)
        rows = want[groups.places]
        torch.testing.assert_close(
            pack.combine(want, groups, weights), (rows * weights[..., None]).sum(1), atol=1e-5, rtol=1e-5
        )


def test_a_dtype_without_a_kernel_is_refused(tmp_path):
    files = resolve_model(tiny_checkpoint(tmp_path, "mixtral"))
    with pytest.raises(ConfigError, match="dtype='bfloat16', got 'float16'"):
        load_model(files, dtype=torch.float16, device=torch.device("cuda"), max_model_len=64)


def test_ranks_that_do_not_divide_an_expert_are_refused(tmp_path):
    config = load(tiny_checkpoint(tmp_path, "mixtral", num_attention_heads=12, num_key_value_heads=6)).config
    for ranks in (1, 2):
        config.check_ranks(ranks)
    size = config.experts.intermediate_size
    with pytest.raises(
        ConfigError, match=f"=3 does not divide the model's intermediate_size of an expert {size}"
    ):
        config.check_ranks(3)


class Second:
    """A rank of two that is never asked to sum."""

    rank, size = 1, 2


def test_a_rank_has_its_part_of_every_expert(tmp_path):
    """Gate and up by rows, down by columns; experts in one stacked tensor cannot be shared out."""
    config = load(tiny_checkpoint(tmp_path, "mixtral")).config
    kind = {"dtype": torch.float32, "device": torch.device("cpu")}
    mlp = SparseMLP(config, config.experts, group=Second(), **kind)
    size, half = config.experts.intermediate_size, config.experts.intermediate_size // 2
    gate, down = mlp.gate_up_proj.share("up_proj"), mlp.down_proj.share("down_proj")
    assert (gate.dim, gate.start, gate.size) == (0, half, half)
    assert (down.dim, down.start, down.size) == (1, half, half)
    assert mlp.gate_up_proj.shape(0, "gate_proj") == (size, config.hidden_size)
    assert mlp.gate_up_proj.destination(0, "gate_proj").shape == (half, config.hidden_size)
    assert mlp.down_proj.shape(0, "down_proj") == (config.hidden_size, size)
    assert mlp.down_proj.destination(0, "down_proj").shape == (config.hidden_size, half)
    for module in (mlp.gate_up_proj, mlp.down_proj):
        with pytest.raises(ConfigError, match="a tensor for each expert"):
            module.destination()
