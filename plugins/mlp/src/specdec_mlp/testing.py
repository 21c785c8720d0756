"""Tiny speculators in the public layouts, for tests: exact names and fields, made in a second.

They are fitted to what a tiny target (``specdecode.testing.tiny``) writes, taken as if its layers added
nothing, so that drafts are accepted now and then.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from specdecode.heads.untrained import RandomWeights, altered
from specdecode.models import load_weights

from .layouts import source
from .publish import published, write

_FIT_STEPS = 60


def write_speculator(
    path: str | Path,
    target: str | Path,
    *,
    n_predict: int = 4,
    inner: int = 32,
    tied: bool = False,
    duplicates: bool = False,
    scale_input: bool = False,
    form: Literal["safetensors", "bin"] = "safetensors",
    vocab: int | None = None,
    hidden_size: int | None = None,
    fit: bool = True,
    seed: int = 0,
    drop: tuple[str, ...] = (),
    tensors: Mapping[str, torch.Tensor] | None = None,
    **config: Any,
) -> Path:
    """Write the checkpoint of a speculator for ``target``; equal arguments, equal files.

    Args:
        path: directory, made if it is not there.
        target: checkpoint of a model in Hugging Face's format.
        duplicates: tied weights are stored once for each step.
        vocab, hidden_size: another target's; such weights are random.
        fit: whether weights are fitted to the target.
        drop: names of stored tensors to leave out.
        tensors: further stored tensors, or others.
        config: further fields of ``config.json``; None takes one out.

    Returns:
        ``path``.
    """
    model = json.loads((Path(target) / "config.json").read_text("utf-8"))
    hidden, rows = hidden_size or model["hidden_size"], vocab or model["vocab_size"]
    normal = RandomWeights(seed).normal
    weights: dict[str, torch.Tensor] = {}
    for step in range(n_predict):
        weights |= {
            f"emb.{step}.weight": normal(rows, inner, std=1.0),
            f"proj.{step}.weight": normal(inner, inner if step else hidden, std=0.1),
            f"head.{step}.weight": normal(rows, inner, std=0.1),
            f"ln.{step}.weight": 1.0 + normal(inner, std=0.1),
            f"ln.{step}.bias": normal(inner, std=0.1),
        }
    used = {source(name, tied=tied) for name in weights}
    weights = {name: tensor for name, tensor in weights.items() if name in used}
    if fit and vocab is None and hidden_size is None:
        _fit(weights, Path(target), n_predict, inner, tied=tied, scale_input=scale_input)
    if duplicates:
        names = [
            f"{name.split('.')[0]}.{k}.{name.split('.')[2]}" for name in weights for k in range(n_predict)
        ]
        weights = {name: weights[source(name, tied=tied)].clone() for name in names}
    fields, stored = published(weights, n_predict=n_predict, tied=tied, scale_input=scale_input)
    return write(path, fields | config, altered(stored, tensors, drop), form=form)


def _fit(
    weights: dict[str, torch.Tensor], target: Path, steps: int, inner: int, *, tied: bool, scale_input: bool
) -> None:
    """Some steps towards what a target of embedding, norm and output layer alone writes."""
    stored = dict(load_weights(target))
    table = stored["model.embed_tokens.weight"].float()
    rows = stored.get("lm_head.weight", stored["model.embed_tokens.weight"]).float()
    states = table * torch.rsqrt(table.square().mean(-1, keepdim=True) + 1e-6) * stored["model.norm.weight"]
    following = (states @ rows.T).argmax(-1)
    share = 0.5 ** (0.5 / steps)
    scale = math.sqrt((1 - share**2) * inner / 2) / share
    with torch.inference_mode(False), torch.enable_grad():
        trained = {name: tensor.clone().requires_grad_() for name, tensor in weights.items()}
        optimizer = torch.optim.Adam(list(trained.values()), lr=0.02)

        def of(kind: str, step: int, part: str = "weight") -> torch.Tensor:
            return trained[source(f"{kind}.{step}.{part}", tied=tied)]

        def norm(x: torch.Tensor) -> torch.Tensor:
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)

        for _ in range(_FIT_STEPS):
            loss, state, last = torch.zeros(()), states, following
            if scale_input:
                state = norm(state) / math.sqrt(2)
            for step in range(steps):
                mixed = state @ of("proj", step).T + scale * of("emb", step)[last]
                state = torch.nn.functional.gelu(of("ln", step) * norm(mixed) + of("ln", step, "bias"))
                last = following[last]
                loss = loss + torch.nn.functional.cross_entropy(state @ of("head", step).T, last)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    weights |= {name: tensor.detach() for name, tensor in trained.items()}
