"""The one sampling rule: the largest of transformed logits plus noise.

Plain decoding, verification and coupled drafting all come through here, which is what makes the
output independent of the drafts. Order of the transforms, as in vLLM: the grammar's mask, allowed ids,
bad words, min_tokens, logit bias, logits processors, penalties, temperature, min_p, top_k, top_p; each
later one sees what the earlier ones left. Greedy rows stop after the penalties. Equal scores: the
lowest id wins.
"""

from __future__ import annotations

import torch
from specdec_kernels import sampling as kernels

from .batch import SamplingBatch

#: What :func:`draw` gives for a row of which no token can be drawn.
UNDRAWABLE = -1


def transform(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """The logits of the distribution that each row draws from.

    Args:
        logits: ``[R, V]`` floating point, left as they are.

    Returns:
        ``[R, V]`` float32, -inf for what cannot be drawn; ``logits`` itself if there is nothing to do.

    Raises:
        ProcessorFault: a row's logits processor raised or gave no logits.
    """
    if logits.shape != (batch.num_rows, batch.vocab_size):
        raise ValueError(f"logits must be [{batch.num_rows}, {batch.vocab_size}], got {list(logits.shape)}")
    if batch.leaves_logits:
        return logits.float()
    out = logits.to(torch.float32, copy=True)
    _keep_grammar(out, batch)
    if batch.allowed is not None:
        entries = batch.allowed.entries
        kernels.keep_tokens(out, batch.allowed.rows, entries.rows, entries.ids)
    if batch.banned is not None:
        kernels.ban_tokens(out, batch.banned.rows, batch.banned.ids)
    if batch.bias is not None:
        kernels.add_bias(out, batch.bias.rows, batch.bias.ids, batch.bias.values)
    for row, process in batch.processed:
        out[row] = process(out[row])
    if batch.processed:
        _keep_grammar(out, batch)  # which a processor does not overrule
    if batch.penalties is not None:
        seen = batch.penalties.entries
        kernels.penalize(
            out,
            seen.rows,
            seen.ids,
            seen.values,
            presence=batch.penalties.presence,
            frequency=batch.penalties.frequency,
            repetition=batch.penalties.repetition,
        )
    if batch.temperature is not None:
        kernels.scale_temperature(out, batch.temperature)
    if batch.min_p is not None:
        kernels.keep_min_p(out, batch.min_p.rows, batch.min_p.values)
    if batch.top_k is not None:
        kernels.keep_top_k(out, batch.top_k.rows, batch.top_k.values, batch.top_k.most)
    if batch.top_p is not None:
        kernels.keep_top_p(out, batch.top_p.rows, batch.top_p.values)
    return out


def _keep_grammar(logits: torch.Tensor, batch: SamplingBatch) -> None:
    if batch.masked is not None:
        kernels.keep_bits(logits, batch.masked.rows, batch.masked.bits)


def draw(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """The token of each row.

    Args:
        logits: ``[R, V]`` floating point, left as they are.

    Returns:
        ``[R]`` int64; :data:`UNDRAWABLE` where every token is excluded or the logits are NaN.

    Raises:
        ProcessorFault: a row's logits processor raised or gave no logits.
    """
    ids, scores = kernels.top_scores(_scores(transform(logits, batch), batch, 1), 1)
    return torch.where(scores > -torch.inf, ids, UNDRAWABLE)[:, 0]


def rank(logits: torch.Tensor, batch: SamplingBatch, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``k`` likeliest outcomes of :func:`draw`, the first being its result.

    For drafters: were ``logits`` the target's own, the first id is what the target draws, and
    siblings ranked so are those it is likely to draw.

    Args:
        logits: ``[R, V]`` floating point, left as they are.
        k: ``1..V``.

    Returns:
        ids ``[R, k]`` int64 and scores ``[R, k]`` float32, log-probability plus noise (greedy rows:
        no noise) in falling order; -inf for ids that cannot be drawn.
    """
    transformed = transform(logits, batch)
    ids, scores = kernels.top_scores(_scores(transformed, batch, k), k)
    return ids, scores - kernels.log_normalizer(transformed)[:, None]


def _scores(transformed: torch.Tensor, batch: SamplingBatch, best: int) -> torch.Tensor:
    noise = batch.noise
    if noise is None:
        return transformed
    keys = (noise.seed, noise.index, noise.position)
    if noise.rows is None:
        return kernels.perturb(transformed, *keys, best=best, stream=noise.stream)
    scores = transformed.clone()
    scores[noise.rows] = kernels.perturb(transformed[noise.rows], *keys, best=best, stream=noise.stream)
    return scores
