"""For tests of recipes: what a recipe is given of a tiny target, without a run of the trainer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from specdecode.contract import FINAL, Tap, TargetInfo
from specdecode.models import load_weights
from specdecode.testing.reference import dense_forward

from .recipe import Batch, Boundary, TrainingTarget


def frozen_target(path: str | Path, info: TargetInfo, counts: torch.Tensor | None = None) -> TrainingTarget:
    """A checkpoint of a native family as recipes see it, in float32 on the CPU.

    Args:
        counts: ``[V]`` int64, how often each token stands in the answers; None: random ones.
    """
    weights = dict(load_weights(path))
    embed = weights["model.embed_tokens.weight"].float()
    if counts is None:
        counts = torch.from_numpy(np.random.default_rng(0).integers(0, 50, info.vocab_size))
    return TrainingTarget(
        info=info,
        device=torch.device("cpu"),
        dtype=torch.float32,
        embed=embed,
        lm_head=weights["lm_head.weight"].float() if "lm_head.weight" in weights else embed,
        norm=weights["model.norm.weight"].float(),
        rms_norm_eps=info.config["rms_norm_eps"],
        counts=counts,
        load_weights=lambda: load_weights(path),
    )


@torch.no_grad()
def packed(model: Any, boundaries: Sequence[Boundary], *documents: Sequence[int]) -> Batch:
    """One row with the documents behind each other, all of them answers, and the model's states of each.

    Args:
        model: the target, loaded, as :func:`specdecode.testing.reference.dense_forward` takes it.
        boundaries: as of :meth:`~specdec_train.recipe.Recipe.taps`.
    """
    taps = [FINAL if boundary == "final" else Tap(boundary) for boundary in boundaries]
    states = [dense_forward(model, list(document), taps)[1] for document in documents]
    lengths = torch.tensor([len(document) for document in documents])
    return Batch(
        ids=torch.tensor([[token for document in documents for token in document]]),
        answer=torch.ones(1, int(lengths.sum()), dtype=torch.bool),
        documents=torch.arange(len(documents)).repeat_interleave(lengths)[None],
        positions=torch.cat([torch.arange(length) for length in lengths.tolist()])[None],
        features={
            boundary: torch.cat([found[place] for found in states])[None].clone()
            for place, boundary in enumerate(boundaries)
        },
    )
