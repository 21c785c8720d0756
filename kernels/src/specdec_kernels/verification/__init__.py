"""Verification on the device: which drafts become output, and the inputs that follow from it.

``B`` rows of ``T`` tokens: the row's last committed token, then up to ``W = T - 1`` drafts, of which draft
``i`` stands in column ``i + 1``. State of rows is int64 and is changed in place; shapes are static, nothing
is asked of the host, so that both may be captured in a CUDA graph.
"""

from __future__ import annotations

from types import ModuleType

import torch

from ..gpu import takes
from . import reference


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
    """Walk down each row's drafts along the tokens the target drew, and commit what is reached.

    A draft is accepted if its parent is the node reached and its id the token drawn there; of siblings
    of one id the first wins. The target's token behind the last accepted draft is committed too. A row
    whose token there is -1, which could not be drawn, commits nothing and is active no more.

    Under the synthetic rule (``rates``) draft ``i`` of a chain is accepted, if those before it are, while a
    uniform number of its row's seed and of its position, ``committed + i``, lies below ``rates[i]``:
    :func:`specdec_kernels.noise.uniform` with index 0, token id 0 and stream 2.

    Args:
        targets: ``[B, T]`` int64, the target's token behind each of ``ids``; -1 where there is none.
        ids: ``[B, T]`` int64.
        lens: ``[B]`` int64, drafts of each row.
        parents: ``[B, W]`` int64, the draft above each, -1 for the committed token, a parent before its
            children; None: chains.
        committed: ``[B]`` int64, tokens of each row; grows by ``counts``.
        limit: ``[B]`` int64, the most tokens a row may have.
        active: ``[B]`` int64, 0 or 1; becomes 0 where ``committed`` reaches ``limit``. What is not active
            commits nothing.
        tokens: out, ``[B, T]`` int64: the committed ids, the last repeated; ``ids[:, 0]`` if there are none.
        counts: out, ``[B]`` int64: how many are committed.
        path: out, ``[B, T]`` int64: the column of ``ids`` behind which each was drawn, the last repeated.
        history: ``[B, L]`` int32, the rows' texts; gets the tokens at their places. ``L >= limit``.
        result: out, ``[B, T + 3]`` int32 for the host: the count (-1: no token could be drawn), how many
            drafts were accepted and how many verified, ``tokens``.
        last: out, ``[B]`` int64: the last committed token of each row.
        rates: ``[W]`` float32: turns the synthetic rule on.
        seed: ``[B]`` int64, for ``rates``.
    """
    state = (targets, ids, lens, committed, limit, active, tokens, counts, path, result)
    _implementation(*state, *(own for own in (parents, history, rates, seed) if own is not None)).accept(
        targets,
        ids,
        lens,
        parents,
        committed,
        limit,
        active,
        tokens=tokens,
        counts=counts,
        path=path,
        history=history,
        result=result,
        last=last,
        rates=rates,
        seed=seed,
    )


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
    """The inputs of a target step that verifies a proposer's drafts, which are never trusted.

    A row's drafts end at ``budget``, and at the first whose id is outside the vocabulary or whose parent
    does not come before it; the latter are faults, with all behind them. Drafts deeper than ``depth``, or
    than the row may still grow by, less the target's own token, are left out and the others close ranks.

    Draft ``i`` goes to slot ``committed + i`` at position ``committed - 1 + level``. In chains it sees all
    slots before its own; in trees the committed ones and those of its ancestors. Padding behind a row's
    drafts, and all of a row that is not active, repeats the last token and writes to block 0.

    Args:
        last: ``[B]`` int64, the last committed token of each row, whose KV is computed in this step.
        draft_ids: ``[B, W']`` int64, ``W' >= W``.
        draft_lens: ``[B]`` int64.
        draft_parents: ``[B, W']`` int64; None: chains.
        committed, limit, active: as :func:`accept` leaves them.
        budget: ``[B]`` int64, the most drafts of each row.
        block_table: ``[B, C]`` int64; slots beyond it are the null block's.
        depth: the most levels of drafts.
        ids, positions, base: out, ``[B, T]`` int64.
        lens: out, ``[B]`` int64, drafts of each row.
        parents: out, ``[B, W]`` int64; -1 behind the drafts.
        write_slots: out, ``[B, T]`` int64, physical.
        extra: out, ``[B, T, E]`` int64, ``E >= depth``: the logical slots of each draft's ancestors, from the
            root down, and its own; -1 where unused. None: chains.
        faults: ``[1]`` int64, grows by the number of drafts cut by fault.
    """
    state = (
        last,
        draft_lens,
        committed,
        limit,
        active,
        budget,
        ids,
        lens,
        parents,
        positions,
        write_slots,
        base,
    )
    rows = [own for own in (draft_ids, draft_parents, block_table) if own is not None]
    wanted = (*state, *(own[:1] for own in rows), *(own for own in (extra,) if own is not None))
    _implementation(*wanted).next_inputs(
        last,
        draft_ids,
        draft_lens,
        draft_parents,
        committed,
        limit,
        active,
        budget,
        block_table,
        block_size=block_size,
        vocab_size=vocab_size,
        depth=depth,
        ids=ids,
        lens=lens,
        parents=parents,
        positions=positions,
        write_slots=write_slots,
        base=base,
        extra=extra,
        faults=faults,
    )


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
    """What a proposer is told behind :func:`accept`, whose ``committed``, ``counts`` and ``path`` these are.

    Each row is fed ``T`` tokens: those it committed, then the last of them again; where it committed none,
    the last one that it has.

    Args:
        limit, active: ``[B]`` int64, as :func:`accept` leaves them.
        budget: ``[B]`` int64, the most drafts of each row.
        width, depth: the most drafts and levels of a step.
        tree: whether a row may have more drafts than levels.

    Returns:
        int64 tensors by name: ``committed`` ``[B]``, a copy; ``positions`` ``[B * T]``; ``hidden``
        ``[B * T]``, the place among the target's tokens of the hidden state behind which each was drawn;
        ``last`` ``[B]``, where each row's last token first stands; ``room`` and ``budget`` ``[B]``, levels
        and drafts left to each row.
    """
    made = (committed, counts, path, limit, active, budget)
    return _implementation(*made).fed_inputs(*made, width=width, depth=depth, tree=tree)


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
    """Where draft layers write their tokens, and at which positions those stand: ``[T]`` int64 each.

    Rows without ``counts``, that is, with nothing to feed, write to block 0, and so does what lies beyond the
    tables.

    Args:
        rows, slots, base: ``[T]`` int64: row, logical slot, and how many slots from 0 on a token sees.
        extra: ``[T, E]`` int64, the scratch slots that it sees besides, -1 where unused.
        counts: ``[B]`` int64.
        block_table: ``[B, C]`` int64.

    Returns:
        Physical slots, and ``base - 1`` plus the number of scratch slots seen.
    """
    rows, base = rows.contiguous(), base.contiguous()
    extra = None if extra is None else extra.contiguous()
    made = (rows, slots, base, counts, *(() if extra is None else (extra,)))
    return _implementation(*made, block_table[:1]).draft_places(
        rows, slots, base, extra, counts, block_table, block_size=block_size
    )


def accepted_moves(
    committed: torch.Tensor,
    counts: torch.Tensor,
    path: torch.Tensor,
    block_table: torch.Tensor,
    *,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """From where to where the accepted nodes of trees move: physical slots, ``[B * W]`` int64 each.

    Node ``i`` stands in the ``i``-th slot behind the last committed token's, and belongs in its level's.
    Both are 0 for what stays, or was not accepted.

    Args:
        committed, counts, path: as :func:`accept` left them.
        block_table: ``[B, C]`` int64.
    """
    return _implementation(committed, counts, path, block_table[:1]).accepted_moves(
        committed, counts, path, block_table, block_size=block_size
    )


def _implementation(*tensors: torch.Tensor) -> ModuleType:
    """The kernels for tensors of a GPU that lie one element behind the other, as those of a step do."""
    if tensors[0].is_cuda and takes() and all(tensor.is_contiguous() for tensor in tensors):
        from . import gpu

        return gpu
    return reference


__all__ = ["accept", "accepted_moves", "draft_places", "fed_inputs", "next_inputs"]
