"""A mixture of experts in the place of a layer's MLP (Shazeer et al., arXiv 1701.06538)."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import torch
from specdec_kernels import activation, experts
from specdec_kernels.gpu import DTYPES as GPU_DTYPES
from specdec_kernels.projection import Activation, Stream, add

from specdecode.contract import ConfigError
from specdecode.distributed import SOLO, Group
from specdecode.layers.experts import ExpertsLinear
from specdecode.layers.packed import Form, PackedWeight

from .config import ACTIVATIONS, DecoderConfig, ExpertsConfig

#: What Mixtral's checkpoints call the parts of an expert.
_PUBLISHED = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


class Router(torch.nn.Module):
    """Scores of all experts, in float32 whatever the model's dtype: ``[T, H] -> [T, E]``.

    Two experts that are nearly as likely as each other would be equal in bfloat16.
    """

    def __init__(
        self, hidden_size: int, num_experts: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        shape = (num_experts, hidden_size)
        self.weight = torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
        self._packed: PackedWeight | None = None
        self._form: Form | None = None

    def pack(self, form: Form) -> None:
        """Take a form of float32: scores are never quantized."""
        self._form = form
        self._packed = form(self.weight.data.float(), None)

    @contextlib.contextmanager
    def refilled(self) -> Iterator[None]:
        """Within, the weight is to be loaded anew; behind, what was packed is packed again."""
        yield
        if self._form is not None:
            self.pack(self._form)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed is not None:
            return self._packed(x.float())
        return torch.nn.functional.linear(x.float(), self.weight.float())


class SparseMLP(torch.nn.Module):
    """A router and its experts, each a gated MLP. Of each expert ranks share out the inner dimension."""

    def __init__(
        self,
        config: DecoderConfig,
        mixture: ExpertsConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        group: Group = SOLO,
    ) -> None:
        super().__init__()
        hidden, size, count = config.hidden_size, mixture.intermediate_size, mixture.num_experts
        kind: dict[str, Any] = {"dtype": dtype, "device": device}
        outputs = inputs = None
        if group.size > 1:
            rows, columns = (mixture.share(group.rank, group.size, dim) for dim in (0, 1))
            outputs, inputs = {"gate_proj": rows, "up_proj": rows}, {"down_proj": columns}
        self.group = group
        self.gate = Router(hidden, count, **kind)
        self.gate_up_proj = ExpertsLinear(
            count, hidden, {"gate_proj": size, "up_proj": size}, shares=outputs, **kind
        )
        self.down_proj = ExpertsLinear(count, size, {"down_proj": hidden}, shares=inputs, **kind)
        self.count, self.normalize = mixture.count, mixture.normalize
        self.activation = getattr(activation, ACTIVATIONS[config.hidden_act])
        self.act: Activation = "silu" if config.hidden_act != "gelu_pytorch_tanh" else "gelu_tanh"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, H] -> [T, H]``."""
        return self.group.all_reduce(self._mix(x))

    def _mix(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's term."""
        logits = self.gate(x)
        if x.is_cuda:
            return experts.mix(
                x,
                logits,
                self.gate_up_proj.weight,
                self.down_proj.weight,
                count=self.count,
                normalize=self.normalize,
                activation=self.act,
            )
        ids, weights = experts.choose(logits, self.count, normalize=self.normalize)
        groups = experts.group(ids, self.gate_up_proj.num_experts)
        gated = self.activation(self.gate_up_proj(x[groups.tokens], groups))
        return experts.combine(self.down_proj(gated, groups), groups, weights)

    def add_to(self, stream: Stream, gain: torch.Tensor, eps: float) -> Stream:
        """The fused forward: the stream with what it gives added, scaled for the norm that comes next."""
        weights = self.gate.weight, self.gate_up_proj.weight, self.down_proj.weight
        how: dict[str, Any] = {"count": self.count, "normalize": self.normalize, "activation": self.act}
        if self.group.size == 1:
            return experts.add_experts(stream, *weights, gain, eps=eps, **how)
        return add(self.group.terms(experts.expert_sums(stream, *weights, eps=eps, **how)), stream, gain)


def check_experts(config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse what no kernel does, before any weight is read.

    Raises:
        ConfigError: names the field, the value and what works.
    """
    if config.experts is not None and device.type == "cuda" and dtype not in GPU_DTYPES:
        raise ConfigError(
            "a mixture of experts computes in bfloat16 or float32 on a GPU: set dtype='bfloat16', got "
            f"{str(dtype).removeprefix('torch.')!r}"
        )


def expert_tensors(path: str, module: ExpertsLinear) -> Iterator[tuple[str, tuple[int, str]]]:
    """The tensors of all experts of the module at ``path``: name, expert and part."""
    block = path.rpartition(".")[0]
    for expert in range(module.num_experts):
        for part in module.parts:
            yield f"{block}.experts.{expert}.{part}.weight", (expert, part)


def plain_name(name: str) -> str:
    """A checkpoint's name of a tensor as most families have it; Mixtral's experts have names of their own."""
    if ".block_sparse_moe." not in name:
        return name
    name = name.replace(".block_sparse_moe.", ".mlp.")
    return re.sub(r"\.(w[123])\.weight$", lambda found: f".{_PUBLISHED[found[1]]}.weight", name)


def published_name(name: str) -> str:
    """The reverse of :func:`plain_name`, for messages."""
    names = {part: own for own, part in _PUBLISHED.items()}
    name = re.sub(r"(\.experts\.\d+\.)(\w+)", lambda found: found[1] + names[found[2]], name)
    return re.sub(r"\.mlp\.(experts|gate)\.", r".block_sparse_moe.\1.", name)
