"""GPTQ (Frantar et al., arXiv 2210.17323) in the layouts of AutoGPTQ and GPTQModel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
from specdec_kernels.quantized import Kind, QuantizedMatrix

from .scheme import Scheme, Target, Tensors, only
from .unpacking import expect, kind_of, sorted_by_group, unpack


@attrs.frozen(kw_only=True)
class GPTQLayout:
    """``qweight [in * bits / 32, out]`` and ``qzeros [groups, out * bits / 32]`` int32, ``scales [groups,
    out]``.

    ``g_idx [in]`` tells the group of each input.
    """

    bits: int
    group_size: int  #: -1: all inputs
    stored_less: int  #: what zero points are more than is stored: 1 in the first version
    kind: Kind
    key: str = "qweight"
    others: tuple[str, ...] = ("qzeros", "scales", "g_idx")

    def groups(self, inputs: int) -> int:
        return 1 if self.group_size == -1 else max(1, inputs // self.group_size)

    def matrix(self, stored: Tensors, outputs: int, inputs: int) -> QuantizedMatrix:
        groups, count = self.groups(inputs), 32 // self.bits
        words = expect("qweight", stored["qweight"], (inputs // count, outputs))
        packed = expect("qzeros", stored["qzeros"], (groups, outputs // count))
        scales = expect("scales", stored["scales"], (groups, outputs)).T.float().contiguous()
        zeros = unpack(packed, self.bits).T.float() + self.stored_less
        codes = unpack(words.T.contiguous(), self.bits)
        codes, order = sorted_by_group(codes, stored.get("g_idx"), groups)
        return QuantizedMatrix(
            kind=self.kind, codes=codes, scales=scales, zeros=zeros.contiguous(), order=order
        )


def read(config: Mapping[str, Any]) -> Scheme:
    """The scheme of a config; ValueError for what is not supported."""
    bits = only(config, "bits", 4, 8)
    form = only(config, "checkpoint_format", "gptq", "gptq_v2", default="gptq")
    if config.get("dynamic"):
        raise ValueError("dynamic gives modules bits of their own")
    layout = GPTQLayout(
        bits=bits,
        group_size=int(config.get("group_size") or 128),
        stored_less=1 if form == "gptq" else 0,
        kind=kind_of(bits),
    )
    ignored = () if config.get("lm_head") else ("lm_head",)
    return Scheme(method="gptq", targets=(Target(layout=layout),), ignored=ignored)
