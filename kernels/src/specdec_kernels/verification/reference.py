"""Verification over whole batches in torch: every shape static, nothing asked of the device."""

from __future__ import annotations

import torch

from specdec_kernels.noise import uniform

#: The stream of the numbers that decide whether a draft is accepted.
ACCEPT_STREAM = 2


def accept(
    targets: torch.Tensor,
    ids: torch.Tensor,
    lens: torch.Tensor,
    parents: torch.Tensor | None,
    committed: torch.Tensor,
    limit: torch.Tensor,
    active: torch.Tensor,
    *,
    tokens: torch.Tensor,
    counts: torch.Tensor,
    path: torch.Tensor,
    history: torch.Tensor | None,
    result: torch.Tensor,
    last: torch.Tensor | None = None,
    rates: torch.Tensor | None = None,
    seed: torch.Tensor | None = None,
) -> None:
    """As :func:`specdec_kernels.verification.accept`."""
    width = targets.shape[1] - 1
    places = torch.arange(width + 1, device=ids.device)
    alive = active != 0
    if rates is not None or parents is None:
        accepts = _accepts(targets, ids, committed, rates, seed)
        accepts = accepts & (places[:width] < lens[:, None])
        accepted = accepts.long().cumprod(dim=1).sum(dim=1)
        reached = places.expand_as(ids)
    else:
        accepted, reached = _walk(targets, ids, lens, parents)
    kept = ids.gather(1, reached)  # of place k the accepted node, from place 1 on
    drawn = targets.gather(1, reached.gather(1, accepted[:, None]))[:, 0]
    fails = alive & (drawn < 0)
    alive = alive & (drawn >= 0)
    accepted = torch.where(alive, accepted, 0)
    own = torch.where(alive, torch.minimum(accepted + 1, limit - committed).clamp_(min=0), 0)
    # Token k is the id of node k + 1 of the path, the last one drawn; the rest repeats what stands last.
    following = torch.cat((kept[:, 1:], drawn[:, None]), dim=1)
    following = torch.where(places == accepted[:, None], drawn[:, None], following)
    ending = torch.minimum(places, (own[:, None] - 1).clamp(min=0))
    some = (own > 0)[:, None]
    tokens.copy_(torch.where(some, following.gather(1, ending), ids[:, :1]))
    path.copy_(torch.where(some, reached.gather(1, ending), 0))
    if last is not None:
        last.copy_(tokens[:, -1])
    if history is not None:
        # What is not new is written over with itself, so that the indices need no mask.
        where = (committed[:, None] + torch.minimum(places, own[:, None] - 1)).clamp(0, history.shape[1] - 1)
        history.scatter_(1, where, torch.where(some, tokens.to(history.dtype), history.gather(1, where)))
    result.copy_(
        torch.cat((torch.where(fails, -1, own)[:, None], accepted[:, None], lens[:, None], tokens), 1)
    )
    counts.copy_(own)
    active.copy_((alive & (committed + own < limit)).to(active.dtype))
    committed += own


def next_inputs(
    last: torch.Tensor,
    draft_ids: torch.Tensor,
    draft_lens: torch.Tensor,
    draft_parents: torch.Tensor | None,
    committed: torch.Tensor,
    limit: torch.Tensor,
    active: torch.Tensor,
    budget: torch.Tensor,
    block_table: torch.Tensor,
    *,
    block_size: int,
    vocab_size: int,
    depth: int,
    ids: torch.Tensor,
    lens: torch.Tensor,
    parents: torch.Tensor,
    positions: torch.Tensor,
    write_slots: torch.Tensor,
    base: torch.Tensor,
    extra: torch.Tensor | None = None,
    faults: torch.Tensor,
) -> None:
    """As :func:`specdec_kernels.verification.next_inputs`."""
    width = ids.shape[1] - 1
    alive = active != 0
    root = (committed - 1).clamp(min=0)[:, None]
    ids.copy_(last[:, None].expand_as(ids))
    positions.copy_(root.expand_as(ids))
    write_slots.zero_()
    base.copy_(committed[:, None].expand_as(ids))
    if extra is not None:
        extra.fill_(-1)
    slots = _physical(block_table, root, block_size)
    write_slots[:, :1] = torch.where(alive[:, None], slots, 0)
    lens.zero_()
    parents.fill_(-1)
    if not width:
        return
    nodes = torch.arange(width, device=ids.device)
    drafts = draft_ids[:, :width]
    claimed = torch.where(alive, torch.minimum(draft_lens, budget), 0).clamp(0, width)
    good = (drafts >= 0) & (drafts < vocab_size)
    above = (nodes - 1).expand_as(drafts)
    if draft_parents is not None:
        above = draft_parents[:, :width]
        good &= (above >= -1) & (above < nodes)
    good &= nodes < claimed[:, None]
    good = good.long().cumprod(dim=1).bool()  # up to the first bad one
    faults += (claimed - good.sum(dim=1)).sum()
    room = (limit - committed - 1)[:, None].clamp(max=depth)
    if draft_parents is None:
        level = (nodes + 1).expand_as(drafts)
        kept = good & (level <= room)
    else:
        above = torch.where(good, above, -1)
        level = _levels(above, depth)
        kept = good & (level <= room)
        # Too deep a node is left out, and what lies below it is deeper still; the others close ranks.
        place = kept.long().cumsum(dim=1) - 1
        order = (~kept).long().argsort(dim=1, stable=True)
        above = torch.where(above < 0, -1, place.gather(1, above.clamp(min=0))).gather(1, order)
        drafts, level, kept = drafts.gather(1, order), level.gather(1, order), kept.gather(1, order)
    lens.copy_(kept.sum(dim=1))
    parents.copy_(torch.where(kept, above, -1))
    ids[:, 1:] = torch.where(kept, drafts, last[:, None])
    positions[:, 1:] = torch.where(kept, root + level, root)
    slots = _physical(block_table, committed[:, None] + nodes, block_size)
    write_slots[:, 1:] = torch.where(kept, slots, 0)
    if extra is None:
        base[:, 1:] += torch.where(kept, level, 0)
        return
    node = torch.where(kept, nodes, -1)
    for _ in range(depth):
        at = (level.gather(1, node.clamp(min=0)) - 1).clamp(0, depth - 1)[..., None]
        there = extra[:, 1:]
        own = torch.where(node >= 0, committed[:, None] + node, there.gather(2, at)[..., 0])
        there.scatter_(2, at, own[..., None])
        node = torch.where(node < 0, -1, parents.gather(1, node.clamp(min=0)))


def _accepts(
    targets: torch.Tensor,
    ids: torch.Tensor,
    committed: torch.Tensor,
    rates: torch.Tensor | None,
    seed: torch.Tensor | None,
) -> torch.Tensor:
    """``[B, W]`` bool: whether each draft of a chain is accepted if those before it are."""
    width = ids.shape[1] - 1
    if rates is None:
        return ids[:, 1:] == targets[:, :-1]
    assert seed is not None
    position = (committed[:, None] + torch.arange(width, device=ids.device)).flatten()
    key, nothing = seed.repeat_interleave(width), torch.zeros_like(position)
    chances = uniform(key, nothing, position, nothing[:, None], stream=ACCEPT_STREAM)
    return chances.view(-1, width) < rates[:width]


def _walk(
    targets: torch.Tensor, ids: torch.Tensor, lens: torch.Tensor, parents: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """How many nodes are accepted ``[B]``, and the column of each in ``ids`` ``[B, T]``, the root first."""
    node, token = torch.full_like(lens, -1), targets[:, 0]
    accepted = torch.zeros_like(lens)
    reached = torch.zeros_like(ids)
    for i in range(ids.shape[1] - 1):
        taken = (parents[:, i] == node) & (ids[:, i + 1] == token) & (i < lens)
        accepted += taken
        node, token = torch.where(taken, i, node), torch.where(taken, targets[:, i + 1], token)
        reached.scatter_(1, accepted[:, None], (node + 1)[:, None])
    return accepted, reached


def _levels(above: torch.Tensor, depth: int) -> torch.Tensor:
    """The level of each node, 1 for children of the root; ``depth + 1`` stands for all that is deeper."""
    level, node = torch.ones_like(above), above
    for _ in range(depth):
        level += node >= 0
        node = torch.where(node < 0, -1, above.gather(1, node.clamp(min=0)))
    return level


def _physical(block_table: torch.Tensor, slots: torch.Tensor, block_size: int) -> torch.Tensor:
    column = slots // block_size
    blocks = block_table.gather(1, column.clamp(max=block_table.shape[1] - 1))
    return torch.where(column < block_table.shape[1], blocks, 0) * block_size + slots % block_size


def fed_inputs(
    committed: torch.Tensor,
    counts: torch.Tensor,
    path: torch.Tensor,
    limit: torch.Tensor,
    active: torch.Tensor,
    budget: torch.Tensor,
    *,
    width: int,
    depth: int,
    tree: bool,
) -> dict[str, torch.Tensor]:
    rows, tokens = path.shape
    fed = torch.minimum(torch.arange(tokens, device=path.device), (counts - 1)[:, None])
    first = torch.arange(rows, device=path.device) * tokens
    room = (limit - committed - 1).clamp(min=0) * active
    budget = torch.where(room > 0, budget, 0)
    return {
        "committed": committed.clone(),
        "positions": ((committed - counts)[:, None] + fed).flatten(),
        "hidden": (first[:, None] + path).flatten(),
        "last": first + (counts - 1).clamp(min=0),
        "room": room.clamp(max=depth),
        "budget": (budget if tree else torch.minimum(budget, room)).clamp(max=width),
    }


def draft_places(
    rows: torch.Tensor,
    slots: torch.Tensor,
    base: torch.Tensor,
    extra: torch.Tensor | None,
    counts: torch.Tensor,
    block_table: torch.Tensor,
    *,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    place = _physical(block_table[rows], slots[:, None], block_size)[:, 0]
    level = 0 if extra is None else (extra >= 0).sum(1)  # a node's ancestors and itself
    return torch.where(counts[rows] > 0, place, 0), base - 1 + level


def accepted_moves(
    committed: torch.Tensor,
    counts: torch.Tensor,
    path: torch.Tensor,
    block_table: torch.Tensor,
    *,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    before = (committed - counts)[:, None]
    level = torch.arange(1, path.shape[1], device=path.device)
    node = path[:, 1:] - 1
    moved = (level < counts[:, None]) & (node != level - 1)
    source, destination = (
        torch.where(moved, _physical(block_table, torch.where(moved, before + place, 0), block_size), 0)
        for place in (node, level - 1)
    )
    return source.flatten(), destination.flatten()
