"""Tiny heads in every public layout, for tests: exact names and fields, made in a second.

They are fitted to what a tiny target (``specdecode.testing.tiny``) writes, taken as if its layers added
nothing, so that drafts are accepted now and then.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from specdecode.heads.files import save_tensors
from specdecode.heads.untrained import RandomWeights, altered
from specdecode.models import load_weights

from .publish import published, write

_FIT_STEPS = 120


def write_heads(
    path: str | Path,
    layout: str,
    target: str | Path,
    *,
    heads: int = 4,
    layers: int = 1,
    output: Literal["own", "shared", "none"] | None = None,
    bias: bool = True,
    draft_vocab: int | None = None,
    whole_rows: bool = False,
    form: Literal["safetensors", "pt"] = "safetensors",
    choices: Sequence[Sequence[int]] | None = None,
    fit: bool = True,
    seed: int = 0,
    drop: tuple[str, ...] = (),
    tensors: Mapping[str, torch.Tensor] | None = None,
    **config: Any,
) -> Path:
    """Write a checkpoint of heads for ``target``; equal arguments, equal files.

    Args:
        path: directory, made if it is not there.
        layout: a public one; ``medusa-2`` is a copy of the target with the heads in its shard.
        target: checkpoint of a model in Hugging Face's format, in one shard.
        layers: of each head.
        output: whose output layers the heads have; None: as the layout has it.
        draft_vocab: tokens that a ``token_map`` keeps (``vllm``).
        whole_rows: the output layers hold all rows beside such a map.
        fit: whether weights are fitted to the target; else they are random.
        drop: names of stored tensors to leave out.
        tensors: further stored tensors, or others.
        config: further fields of ``config.json``; None takes one out.

    Returns:
        ``path``.
    """
    path, target = Path(path), Path(target)
    model = json.loads((target / "config.json").read_text("utf-8"))
    stored = dict(load_weights(target))
    weights = _weights(
        stored,
        model,
        heads=heads,
        layers=layers,
        output=output or {"head-only": "none", "vllm": "own"}.get(layout, "own"),
        bias=bias,
        fit=fit,
        normal=RandomWeights(seed).normal,
    )
    if draft_vocab is not None:
        kept = torch.randperm(model["vocab_size"], generator=torch.Generator().manual_seed(seed + 1))
        weights["token_map"] = kept = kept[:draft_vocab].sort().values
        if not whole_rows:
            weights |= {name: rows[kept] for name, rows in weights.items() if name.startswith("out.")}
    if layout == "medusa-2":
        fields, added = published(layout, weights, vocab_size=model["vocab_size"], choices=choices)
        shutil.copytree(target, path, dirs_exist_ok=True)
        save_tensors(path / "model.safetensors", altered({**stored, **added}, tensors, drop))
        fields = model | fields
    else:
        write(
            path,
            layout,
            weights,
            vocab_size=model["vocab_size"],
            base_model="nobody/target",
            choices=choices,
            form=form,
        )
        fields = json.loads((path / "config.json").read_text("utf-8"))
        file = next(file for file in path.iterdir() if file.suffix in (".safetensors", ".pt"))
        if drop or tensors:
            save_tensors(file, altered(_load_file(file), tensors, drop))
    fields = {key: value for key, value in (fields | config).items() if value is not None}
    (path / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    return path


def _weights(
    stored: Mapping[str, torch.Tensor],
    model: Mapping[str, Any],
    *,
    heads: int,
    layers: int,
    output: str,
    bias: bool,
    fit: bool,
    normal: Callable[..., torch.Tensor],
) -> dict[str, torch.Tensor]:
    hidden, vocab = model["hidden_size"], model["vocab_size"]
    table = stored["model.embed_tokens.weight"].float()
    rows = stored.get("lm_head.weight", stored["model.embed_tokens.weight"]).float()
    weights: dict[str, torch.Tensor] = {}
    for head in range(heads):
        for layer in range(layers):
            weights[f"blocks.{head}.{layer}.weight"] = normal(hidden, hidden, std=0.1)
            if bias:
                weights[f"blocks.{head}.{layer}.bias"] = normal(hidden, std=0.1)
    if output == "own":
        weights |= {f"out.{head}.weight": rows + normal(vocab, hidden, std=0.01) for head in range(heads)}
    elif output == "shared":
        weights["out.weight"] = rows + normal(vocab, hidden, std=0.01)
    if fit:
        _fit(weights, table, stored["model.norm.weight"].float(), rows, heads, layers)
    return weights


def _fit(
    weights: dict[str, torch.Tensor],
    table: torch.Tensor,
    norm: torch.Tensor,
    rows: torch.Tensor,
    heads: int,
    layers: int,
) -> None:
    """Some steps towards what a target of embedding, norm and output layer alone writes."""
    states = table * torch.rsqrt(table.square().mean(-1, keepdim=True) + 1e-6) * norm
    following = (states @ rows.T).argmax(-1)
    with torch.inference_mode(False), torch.enable_grad():
        trained = {name: tensor.clone().requires_grad_() for name, tensor in weights.items()}
        optimizer = torch.optim.Adam(list(trained.values()), lr=0.02)
        for _ in range(_FIT_STEPS):
            loss = torch.zeros(())
            wanted = following
            for head in range(heads):
                wanted = following[wanted]
                z = states
                for layer in range(layers):
                    made = z @ trained[f"blocks.{head}.{layer}.weight"].T
                    z = z + torch.nn.functional.silu(made + trained.get(f"blocks.{head}.{layer}.bias", 0.0))
                out = trained.get(f"out.{head}.weight", trained.get("out.weight", rows))
                loss = loss + torch.nn.functional.cross_entropy(z @ out.T, wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    weights |= {name: tensor.detach() for name, tensor in trained.items()}


def _load_file(file: Path) -> dict[str, torch.Tensor]:
    if file.suffix == ".pt":
        return dict(torch.load(file, weights_only=True))
    from safetensors.torch import load_file

    return load_file(file)
