"""Runs the target: staged inputs in, logits of the tokens to verify and tapped hidden states out."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import attrs
import torch
from specdec_kernels.attention import AttentionMetadata

from ..contract import FINAL, Needs, Tap
from ..engine.plan import RowPlan, StepPlan
from ..kv.pool import BlockPool
from ..kv.store import KVStore
from ..layers import GivenEmbeddings
from ..models import Decoder, TransformersDecoder
from .adapting import adapted
from .images import EncodedImages
from .inputs import SlotMap, TargetBatch, stage

#: Most tokens whose logits are made at a time where a whole prompt's are wanted.
LOGIT_ROWS = 256


def checks_writes() -> bool:
    """Whether each step's writes are looked at, on the host."""
    return bool(os.environ.get("SPECDECODE_CHECK_WRITES"))


@attrs.frozen(eq=False)
class TargetOutput:
    """What a target forward gave."""

    batch: TargetBatch
    logits: torch.Tensor  #: ``[R, vocab]`` float32
    hidden: torch.Tensor  #: ``[T, hidden]`` after the final norm
    taps: dict[Tap, torch.Tensor]  #: each ``[T, hidden]``


class ModelRunner:
    """The target on its KV layers."""

    def __init__(
        self,
        model: Decoder | TransformersDecoder,
        store: KVStore,
        pool: BlockPool,
        device: torch.device,
        needs: Needs | None = None,
        max_slots: int | None = None,
        images: EncodedImages | None = None,
    ) -> None:
        """What runs ``model``.

        Args:
            max_slots: no row has a slot at or above it; None: nobody knows.
            images: vectors of the prompts' images; None: the model takes text only.
        """
        taps = needs.taps if needs else ()
        self.model = model
        self.store = store
        self.device = device
        self.max_slots = max_slots
        self.images = images
        self._pool = pool
        self.block_size, self.num_blocks = pool.block_size, pool.num_blocks
        self._scratch = needs.reserve if needs else 0
        self._final = FINAL in taps
        self._boundaries = tuple(tap.boundary for tap in taps if isinstance(tap.boundary, int))
        self.check_writes = checks_writes()

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> TargetOutput:
        """Compute all tokens of ``plan``."""
        batch = stage(plan, self._pool.block_size, self.device, self._scratch, self.max_slots)
        self.check(batch.meta.write_slots)
        given = None if self.images is None else self.images.of_plan(plan, batch.offsets)
        hidden, taps = self.target(batch.ids, batch.meta, batch.adapters, given)
        logits = self.model.compute_logits(hidden[batch.logit_tokens])
        return TargetOutput(batch, logits, hidden, taps)

    def slots_of(self, rows: Sequence[RowPlan]) -> SlotMap:
        """The slots of ``rows``, as :meth:`forward` lays them out."""
        return SlotMap(rows, self.block_size, self.device, self._scratch)

    def target(
        self,
        ids: torch.Tensor,
        meta: AttentionMetadata,
        adapters: torch.Tensor | None = None,
        given: GivenEmbeddings | None = None,
    ) -> tuple[torch.Tensor, dict[Tap, torch.Tensor]]:
        """The target over staged inputs: ``[T, hidden]`` after the final norm, and each tap's.

        Args:
            adapters: ``[T]`` int64, the slot of each token's adapter, -1 for none; None: nobody has one.
            given: embeddings of tokens that stand for parts of images.
        """
        more = {} if given is None else {"given": given}
        with adapted(self.model, adapters):
            hidden, tapped = self.model(
                ids, meta.positions, meta, self.store.target, self._boundaries, **more
            )
        taps: dict[Tap, torch.Tensor] = dict(zip(map(Tap, self._boundaries), tapped, strict=True))
        if self._final:
            taps[FINAL] = hidden
        return hidden, taps

    def check(self, write_slots: torch.Tensor) -> None:
        """Under ``SPECDECODE_CHECK_WRITES``, see that the target writes where it may."""
        if self.check_writes:
            self.assert_writable(write_slots, draft=False)

    def logits_in_slices(self, hidden: torch.Tensor) -> Iterator[torch.Tensor]:
        """Logits of many tokens, ``[N, hidden]``, as parts ``[n, vocab]`` that memory has room for."""
        for part in hidden.split(LOGIT_ROWS):
            yield self.model.compute_logits(part)

    @torch.inference_mode()
    def keep_accepted(self, plan: StepPlan, accepted: Sequence[Sequence[int]]) -> None:
        """Move the accepted nodes' KV behind the committed tokens; a chain's is there already.

        Args:
            accepted: for each row of ``plan`` its accepted nodes, in path order.
        """
        source: list[int] = []
        destination: list[int] = []
        size = self._pool.block_size
        for row, nodes in zip(plan.rows, accepted, strict=True):
            blocks, committed = row.request.table.blocks, row.start + row.new
            for level, node in enumerate(nodes):
                if node != level:
                    for slots, slot in ((source, committed + node), (destination, committed + level)):
                        slots.append(blocks[slot // size] * size + slot % size)
        if source:
            self.store.move(
                torch.tensor(source, device=self.device), torch.tensor(destination, device=self.device)
            )

    def assert_writable(self, write_slots: torch.Tensor, *, draft: bool) -> None:
        """Raise AssertionError if a write would reach a block that is published or held twice."""
        allowed = self._pool.may_write_draft if draft else self._pool.may_write_target
        for block in (write_slots // self._pool.block_size).unique().tolist():
            assert allowed(block), (
                f"{'draft' if draft else 'target'} write into block {block}, which is shared"
            )
