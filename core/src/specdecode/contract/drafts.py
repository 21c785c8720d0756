"""The buffers a proposer fills."""

from __future__ import annotations

from typing import Any

import attrs


@attrs.define(eq=False)
class Drafts:
    """The drafts of ``B`` rows, at most ``W`` (``Needs.width``) each; core owns and re-uses the buffers.

    numpy arrays for ``Place.HOST``, torch tensors on the target's device for ``Place.DEVICE``.
    At each call of ``propose`` they arrive with ``lens`` 0 and ``parents`` a chain, so a chain
    proposer writes ``ids`` and ``lens`` only. Of equal siblings the first wins. Core cuts a row at
    its first id outside the vocabulary or parent that does not come before its child.
    """

    ids: Any  #: ``[B, W]`` int64, target vocabulary
    lens: Any  #: ``[B]`` int64, drafts of each row, at most the row's ``budget``
    parents: Any  #: ``[B, W]`` int64: index of the parent node, -1 = the row's last token
    #: ``[B, W]`` float32 in 0..1: confidence, never used by verification; of a method that declares
    #: ``scores`` the chance, as it sees it, that the node and all above it are accepted
    score: Any
    #: ``[B, W, V]`` float32 if ``Needs.probs`` is FULL, else None: the law that each node was drawn from,
    #: given its parent and its earlier siblings; sums to 1, and is above 0 for the node's own id
    probs: Any = None
