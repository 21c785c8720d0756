"""AWQ (Lin et al., arXiv 2306.00978) in the layout of AutoAWQ's ``gemm`` version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
from specdec_kernels.quantized import Kind, QuantizedMatrix

from .scheme import Scheme, Target, Tensors, names, only
from .unpacking import expect, unpack

#: Which of eight neighbouring outputs the nibbles of a word hold, from the lowest on.
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@attrs.frozen(kw_only=True)
class AWQLayout:
    """``qweight [in, out / 8]`` and ``qzeros [groups, out / 8]`` int32, ``scales [groups, out]``."""

    group_size: int  #: -1: all inputs
    kind: Kind = "int4"
    key: str = "qweight"
    others: tuple[str, ...] = ("qzeros", "scales")

    def groups(self, inputs: int) -> int:
        return 1 if self.group_size == -1 else max(1, inputs // self.group_size)

    def matrix(self, stored: Tensors, outputs: int, inputs: int) -> QuantizedMatrix:
        groups = self.groups(inputs)
        words = expect("qweight", stored["qweight"], (inputs, outputs // 8))
        zeros = None
        if "qzeros" in stored:
            packed = expect("qzeros", stored["qzeros"], (groups, outputs // 8))
            zeros = unpack(packed, 4, _ORDER).T.float().contiguous()
        scales = expect("scales", stored["scales"], (groups, outputs)).T.float().contiguous()
        codes = unpack(words, 4, _ORDER).T.contiguous()
        return QuantizedMatrix(kind="int4", codes=codes, scales=scales, zeros=zeros)


def read(config: Mapping[str, Any]) -> Scheme:
    """The scheme of a config; ValueError for what is not supported."""
    only(config, "bits", 4, default=4)
    version = str(config.get("version") or "gemm").lower()
    if version != "gemm":
        raise ValueError(f"version is {version!r}, and can be 'gemm'")
    size = int(config.get("group_size") or 128)
    layout = AWQLayout(group_size=size)
    ignored = ("lm_head", *names(config, "modules_to_not_convert"))
    return Scheme(method="awq", targets=(Target(layout=layout),), ignored=ignored)
