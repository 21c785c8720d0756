"""Adapters of random weights as PEFT writes them, and checkpoints into which such a one is merged."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ..api.llm import LLM
from ..api.params import SamplingParams
from ..lora.request import LoRARequest
from ..models import load_weights
from .divergence import explain_divergence

#: Modules of a layer that adapters are often trained for.
ATTENTION = ("q_proj", "v_proj")
ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
#: What PEFT puts before a module's name.
PREFIX = "base_model.model."


def write_adapter(
    path: str | Path,
    checkpoint: str | Path,
    *,
    rank: int = 8,
    alpha: float = 16,
    modules: Sequence[str] = ALL_LINEAR,
    ranks: Mapping[str, int] | None = None,
    strength: float = 0.3,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    """Write an adapter for ``checkpoint``; equal arguments, equal files.

    Args:
        modules: last parts of the names of those that it changes.
        ranks: full name of a module -> its rank, where it is not ``rank``.
        strength: size of the change beside that of the weights it is added to.
        config: further fields of ``adapter_config.json``, or others than these.

    Returns:
        ``path``.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in load_weights(checkpoint):
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] not in modules:
            continue
        own = (ranks or {}).get(module, rank)
        size = weight.float().std() * strength * weight.shape[1] ** 0.5 / alpha * own**0.5
        a = torch.randn(own, weight.shape[1], generator=generator) * weight.shape[1] ** -0.5
        b = torch.randn(weight.shape[0], own, generator=generator) * size
        tensors[f"{PREFIX}{module}.lora_A.weight"] = a.to(dtype)
        tensors[f"{PREFIX}{module}.lora_B.weight"] = b.to(dtype)
    save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(modules),
        "bias": "none",
        "rank_pattern": dict(ranks or {}),
    }
    (path / "adapter_config.json").write_text(json.dumps(fields | config, indent=2), encoding="utf-8")
    return path


def merge_adapter(path: str | Path, checkpoint: str | Path, adapter: str | Path) -> Path:
    """Write a copy of ``checkpoint`` whose weights are ``W + scale B A``.

    The scale is PEFT's: ``alpha / r``, or ``alpha / sqrt(r)`` under ``use_rslora``, with the patterns.

    Returns:
        ``path``.
    """
    path, adapter = Path(path), Path(adapter)
    shutil.copytree(checkpoint, path, ignore=shutil.ignore_patterns("*.safetensors*"))
    config = json.loads((adapter / "adapter_config.json").read_text("utf-8"))
    factors = load_file(adapter / "adapter_model.safetensors")

    def of(pattern: str, module: str, default: float) -> float:
        table = config.get(pattern) or {}
        return next((v for key, v in table.items() if re.search(rf"(^|\.){key}$", module)), default)

    tensors = {}
    for name, weight in load_weights(checkpoint):
        module = name.removesuffix(".weight")
        if (a := factors.get(f"{PREFIX}{module}.lora_A.weight")) is not None:
            b = factors[f"{PREFIX}{module}.lora_B.weight"]
            rank = of("rank_pattern", module, config["r"])
            scale = of("alpha_pattern", module, config["lora_alpha"]) / (
                rank**0.5 if config.get("use_rslora") else rank
            )
            merged = weight.double() + scale * b.double() @ a.double()
            weight = merged.to(weight.dtype)
        tensors[name] = weight
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


class AdapterLab:
    """A target, three adapters of different make, and engines without room for any to compare with."""

    #: Of :func:`write_adapter`.
    KINDS: Sequence[Mapping[str, Any]] = (
        {"rank": 8},
        {"rank": 4, "modules": ATTENTION, "strength": 0.8, "use_rslora": True},
        {
            "rank": 16,
            "modules": ("o_proj", "down_proj", "up_proj"),
            "target_modules": r".*\.(o_proj|down_proj|up_proj)",
            "ranks": {"model.layers.1.mlp.up_proj": 3},
            "alpha_pattern": {"layers.0.self_attn.o_proj": 32},
        },
    )
    #: Which adapter each of eight requests has; None: none.
    MIXED: Sequence[int | None] = (0, None, 1, 2, 2, None, 0, 1)

    def __init__(self, folder: Path, target: Path, **options: Any) -> None:
        """``options``: of all engines."""
        self.target = target
        self.paths = [
            write_adapter(folder / f"{i}", target, seed=i, **kind) for i, kind in enumerate(self.KINDS)
        ]
        self._folder = folder
        self._options = {
            "dtype": "float32",
            "device": "cpu",
            "block_size": 4,
            "num_gpu_blocks_override": 300,
            "max_num_seqs": 8,
            "max_model_len": 96,
            "skip_tokenizer_init": True,
        } | options
        self._merged: dict[int | None, LLM] = {}

    def request(self, index: int | None) -> LoRARequest | None:
        """For adapter ``index``, which is called ``adapter-index``."""
        return None if index is None else LoRARequest(f"adapter-{index}", index + 1, str(self.paths[index]))

    def engine(self, **changes: Any) -> LLM:
        """An engine on the target with room for adapters."""
        return LLM(str(self.target), **(self._options | {"enable_lora": True, "max_loras": 3} | changes))

    def merged(self, index: int | None) -> LLM:
        """The engine of the target, or of the checkpoint that it is with adapter ``index`` merged in."""
        if index not in self._merged:
            path = self.target
            if index is not None:
                path = merge_adapter(self._folder / f"merged-{index}", self.target, self.paths[index])
            self._merged[index] = LLM(str(path), **self._options)
        return self._merged[index]

    def close(self) -> None:
        for engine in self._merged.values():
            engine.shutdown()

    @staticmethod
    def asks(count: int = 8, **changes: Any) -> tuple[list[dict[str, list[int]]], list[SamplingParams]]:
        """Prompts of different lengths, greedy and seeded in turn."""
        kinds: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.8, "seed": 5}]
        prompts = [{"prompt_token_ids": list(range(5 + i, 20 + 3 * i))} for i in range(count)]
        return prompts, [
            SamplingParams(**({"max_tokens": 16} | kinds[i % 2] | changes)) for i in range(count)
        ]

    def generate(
        self, llm: LLM, prompts: Any, params: Any, kinds: Sequence[int | None] = MIXED
    ) -> list[list[int]]:
        """Output ids of prompts, each answered with its adapter."""
        requests = [self.request(kind) for kind in kinds[: len(prompts)]]
        outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=requests)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def check(
        self,
        prompts: Sequence[Mapping[str, list[int]]],
        params: Sequence[SamplingParams],
        outputs: Sequence[Sequence[int]],
        kinds: Sequence[int | None] = MIXED,
    ) -> None:
        """Outputs must be those of the engines that have the adapters merged in.

        Where a sum of two products rounds otherwise than the merged weight's, two tokens may be as good as
        equal; without an adapter there is no such excuse.
        """
        for prompt, own, kind, got in zip(prompts, params, kinds, outputs, strict=False):
            (output,) = self.merged(kind).generate([prompt], own, use_tqdm=False)
            expected = list(output.outputs[0].token_ids)
            if got != expected:
                assert kind is not None, (got, expected)
                ids = prompt["prompt_token_ids"]
                found = explain_divergence(self.merged(kind), ids, got, expected, own)
                assert found is not None and found.kind == "tie", found
