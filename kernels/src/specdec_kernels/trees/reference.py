"""Growing trees in torch: a dozen kernels a level."""

from __future__ import annotations

import torch

from .candidates import Candidates, Level, Tree, first_candidate


def extend(candidates: Candidates, above: Level | None, ids: torch.Tensor, scores: torch.Tensor) -> Level:
    batch, nodes, fanout = ids.shape
    depth = 1 if above is None else above.paths.shape[2] + 1
    first = first_candidate(fanout, depth)
    part = slice(first, first + nodes * fanout)
    own = confidence(scores)
    total = own.flatten(1) if above is None else (above.total[..., None] + own).flatten(1)
    candidates.ids[:, part] = ids.flatten(1)
    candidates.scores[:, part] = total
    candidates.parents[:, part] = -1 if above is None else above.nodes.repeat_interleave(fanout, dim=1)
    best, chosen = _best(total, fanout)
    parent = chosen // fanout
    rows = parent + torch.arange(batch, device=ids.device)[:, None] * nodes
    entry = torch.arange((depth - 1) * fanout, depth * fanout, device=ids.device)
    if candidates.first is not None:
        entry = candidates.first[:, None] + entry
    paths = entry.expand(batch, -1)[..., None]
    if above is not None:
        ancestors = above.paths.gather(1, parent[..., None].expand(-1, -1, depth - 1))
        paths = torch.cat((ancestors, paths), -1)
    return Level(ids.flatten(1).gather(1, chosen), best, first + chosen, rows.flatten(), paths)


def keep(
    candidates: Candidates,
    room: torch.Tensor,
    width: int,
    budget: torch.Tensor | None = None,
    out: Tree | None = None,
) -> Tree:
    count, fanout = candidates.ids.shape[1], candidates.fanout
    # Levels, from 0 on, have one time ``fanout`` nodes, then its square: as if the first had the square, too.
    missing = fanout * fanout - fanout
    numbers = torch.arange(missing, missing + count, device=candidates.ids.device)
    deep = numbers // (fanout * fanout) >= room[:, None]
    best, order = _best(candidates.scores.masked_fill(deep, -torch.inf), count)
    place = torch.arange(count, device=order.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(1, order, place)
    above = candidates.parents.gather(1, order[:, :width])
    lens = (best[:, :width] > -torch.inf).sum(1)
    tree = Tree(
        ids=candidates.ids.gather(1, order[:, :width]),
        parents=torch.where(above < 0, -1, rank.gather(1, above.clamp(min=0))),
        lens=lens if budget is None else torch.minimum(lens, budget),
    )
    if out is None:
        return tree
    out.ids[:], out.parents[:], out.lens[:] = tree.ids, tree.parents, tree.lens
    return out


def confidence(scores: torch.Tensor) -> torch.Tensor:
    """Log-confidences ``[..., K]``, none above 0, of the scores of siblings (:func:`~.extend`).

    Those of a greedy row are log-probabilities and stay as they are, which is EAGLE-2.
    """
    most = scores.logsumexp(-1, keepdim=True).clamp(min=0.0)
    return torch.nan_to_num(scores - most, nan=-torch.inf, neginf=-torch.inf).clamp(max=0.0)


def _best(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``count`` best of each row, the earlier of equals first."""
    values, order = torch.sort(scores, dim=1, descending=True, stable=True)
    return values[:, :count], order[:, :count]
