"""GGUF files whose blocks of 32 inputs are computed with as they are: Q4_0, Q4_1 and Q8_0 (llama.cpp)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import attrs
import torch
from specdec_kernels.quantized import QuantizedMatrix

from specdecode.contract import ConfigError

from .loading import Finder, Part

_BLOCK = 32
#: A module's name, without its layer, to the file's.
_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
#: Architectures of files that are read, and whether heads are rotated by neighbouring pairs there.
_ARCHITECTURES = {"llama": True, "qwen2": False, "qwen3": False}
_TYPES = ("Q4_0", "Q4_1", "Q8_0")


@attrs.define(eq=False)
class _Blocks:
    """A tensor of the file; ``heads``: of rows that are to be put in the order of rotary halves, 0: none."""

    name: str
    part: str | None
    tensor: Any
    heads: int
    tensors: dict[str, torch.Tensor] = attrs.Factory(dict)

    def matrix(self, outputs: int, inputs: int) -> QuantizedMatrix:
        matrix = read_blocks(torch.from_numpy(self.tensor.data.copy()), self.tensor.tensor_type.name)
        if tuple(matrix.shape) != (outputs, inputs):
            raise ValueError(f"{self.tensor.name} must be {[outputs, inputs]}, got {list(matrix.shape)}")
        return matrix if not self.heads else _halves(matrix, self.heads)


def gguf_parts(file: Path, *, heads: int, kv_heads: int, tied: bool) -> Finder:
    """The modules that are blocks of the file; those of other types stay as they were converted.

    Args:
        heads, kv_heads: of queries and keys.
        tied: the output layer is the embedding's table.

    Raises:
        ConfigError: the file is of another architecture.
    """
    from gguf import GGUFReader

    reader = GGUFReader(file)
    field = reader.get_field("general.architecture")
    architecture = None if field is None else field.contents()
    if architecture not in _ARCHITECTURES:
        raise ConfigError(
            f"quantization='gguf' computes with the blocks of {', '.join(_ARCHITECTURES)} files, got "
            f"{architecture!r} in {file}: leave quantization out, or use 'int8'"
        )
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    rotated = {"attn_q": heads, "attn_k": kv_heads} if _ARCHITECTURES[architecture] else {}

    def find(name: str, part: str | None) -> Part | None:
        if name == "lm_head":
            short, owner = "output", "token_embd.weight" if tied else "output.weight"
        else:
            _, layer, module = name.split(".", 2)
            short = _NAMES.get(module, "")
            owner = f"blk.{layer}.{short}.weight"
        tensor = tensors.get(owner)
        if tensor is None or tensor.tensor_type.name not in _TYPES:
            return None
        return _Blocks(name, part, tensor, rotated.get(short, 0))

    return find


def read_blocks(data: torch.Tensor, kind: str) -> QuantizedMatrix:
    """``[out, bytes of a row]`` uint8 as a matrix.

    A block is a scale in float16, for Q4_1 an offset behind it, then 32 codes: of Q8_0 int8, else halves of
    sixteen bytes, the first sixteen inputs in the lower ones.
    """
    head = 4 if kind == "Q4_1" else 2
    size = head + (_BLOCK if kind == "Q8_0" else _BLOCK // 2)
    if data.shape[1] % size:
        raise ValueError(f"rows of {data.shape[1]} bytes are no blocks of {kind}")
    blocks = data.unflatten(1, (-1, size))
    numbers = blocks[:, :, :head].contiguous().view(torch.float16).float()
    values = blocks[:, :, head:]
    if kind == "Q8_0":
        codes = (values.contiguous().view(torch.int8).to(torch.int16) + 128).to(torch.uint8)
    else:
        codes = torch.cat((values & 15, values >> 4), 2)
    return QuantizedMatrix(
        kind="int8" if kind == "Q8_0" else "int4",
        codes=codes.flatten(1).contiguous(),
        scales=numbers[:, :, 0].contiguous(),
        offsets=numbers[:, :, 1].contiguous() if kind == "Q4_1" else None,
    )


def _halves(matrix: QuantizedMatrix, heads: int) -> QuantizedMatrix:
    """Rows of each head from neighbouring pairs to two halves, as they are rotated here."""
    rows = torch.arange(matrix.shape[0]).view(heads, -1, 2).transpose(1, 2).flatten()
    offsets = None if matrix.offsets is None else matrix.offsets[rows]
    return dataclasses.replace(matrix, codes=matrix.codes[rows], scales=matrix.scales[rows], offsets=offsets)
