"""A request inside the engine: its tokens, how much of them is computed, and its blocks. Knows no torch."""

from __future__ import annotations

import enum
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs

from ..kv import BlockPool, BlockTable

if TYPE_CHECKING:
    from ..api.params import SamplingParams
    from ..lora.slots import Adapter
    from ..models import PromptImage
    from ..sampling.bad_words import BadWords
    from ..sampling.history import TokenHistory
    from ..sampling.processors import LogitsProcessors
    from ..structured import GrammarState


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"  #: met its stop in this step; fed once more, then finished
    FINISHED = "finished"


@attrs.frozen
class RowDrafts:
    """Drafts of one request to be verified; node ``i`` hangs on ``parents[i]`` (-1: the last token)."""

    ids: tuple[int, ...]
    parents: tuple[int, ...]
    #: ``[n, V]`` float32 tensor: the law that each was drawn from. None: they are point masses.
    probs: Any = attrs.field(default=None, eq=False, repr=False)
    scores: Sequence[float] = ()  #: the proposer's confidence in each, where somebody asks for it

    def __len__(self) -> int:
        return len(self.ids)

    def first(self, count: int) -> RowDrafts:
        """The first ``count`` nodes: closed under parents, since a parent comes before its child."""
        if count >= len(self):
            return self
        probs = None if self.probs is None else self.probs[:count]
        return RowDrafts(self.ids[:count], self.parents[:count], probs, self.scores[:count])

    def depths(self) -> list[int]:
        """Level of each node, 1 for children of the last token."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    def paths(self) -> list[tuple[int, ...]]:
        """For each node the nodes from the root down to itself."""
        paths: list[tuple[int, ...]] = []
        for node, parent in enumerate(self.parents):
            paths.append((*(() if parent < 0 else paths[parent]), node))
        return paths


NO_DRAFTS = RowDrafts((), ())


@attrs.define(kw_only=True)
class RequestStats:
    """Times are ``time.perf_counter`` seconds; counts are of this request alone."""

    arrival: float = attrs.field(factory=time.perf_counter)
    first_scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None
    drafted: int = 0  #: draft tokens verified
    accepted: int = 0  #: of them accepted, and part of the output
    discarded: int = 0  #: of them accepted behind the end of the output
    bonus: int = 0  #: tokens of the output that the target drew at the end of such a verification
    draft_steps: int = 0  #: verifications that had drafts
    steps: int = 0  #: target forwards that gave tokens after the first
    preemptions: int = 0
    cached_tokens: int = 0  #: prompt tokens found in the prefix cache at first admission


@attrs.define(eq=False)
class Request:
    """One sequence: ``token_ids`` are committed, prompt included; ``computed`` of them have target KV."""

    id: str
    prompt_ids: Sequence[int]
    params: SamplingParams
    seed: int
    index: int  #: completion index of an ``n > 1`` request
    namespace: str
    limit: int  #: most tokens, prompt included
    eos_ids: frozenset[int] = frozenset()  #: empty under ignore_eos
    stop_ids: tuple[int, ...] = ()  #: EOS and stop_token_ids: masked before min_tokens
    adapter: Adapter | None = None
    images: Sequence[PromptImage] = ()  #: in its prompt
    leader: Request | None = None  #: completion 0, whose prompt this one waits for
    history: TokenHistory | None = None  #: kept if a penalty needs it
    bad_words: BadWords | None = None
    processors: LogitsProcessors | None = None
    grammar: GrammarState | None = None  #: where its structured output stands
    prompt_logprobs: int | None = None  #: how many are wanted for each of the prompt's tokens
    scored: int = 0  #: prompt tokens after the first whose log-probabilities are known
    token_ids: list[int] = attrs.Factory(lambda self: list(self.prompt_ids), takes_self=True)
    status: Status = Status.WAITING
    arrival: int = 0  #: how many were queued before it
    priority: int = 0  #: lower ones come first
    finish_reason: str | None = None
    admitted: bool = False
    failed: bool = False  #: there is no token to draw after these; ends when that is delivered
    background: bool = False  #: the engine's own: yields to others, is not drafted for, and not counted
    undrafted: bool = False  #: its drafts are passed over: one of them gave NaN
    computed: int = 0
    drafts: RowDrafts = NO_DRAFTS
    table: BlockTable = attrs.field(init=False)
    target_floor: int = 0  #: target KV below this slot is kept as it is
    draft_floor: int = 0  #: draft entries below this slot are kept as they are
    own: list[int] = attrs.field(factory=list)  #: for each KVSpec, entries 0..own-1 are true
    rests: bool = (
        False  #: the proposer was left out of its steps: it is not fed, nor drafted for, before it wakes
    )
    delivered: int = attrs.Factory(
        lambda self: len(self.prompt_ids), takes_self=True
    )  #: tokens the host has seen
    stats: RequestStats = attrs.Factory(RequestStats)

    def attach(self, pool: BlockPool, num_kv_specs: int) -> None:
        """Give it an empty block table."""
        adapted = "" if self.adapter is None else self.adapter.namespace
        marks = [image.mark for image in self.images]
        self.table = BlockTable(pool, self.namespace + adapted, self.limit, marks)
        self.own = [0] * num_kv_specs

    @property
    def adapter_slot(self) -> int:
        """Where its adapter is on the device, while it runs; -1: it has none."""
        return -1 if self.adapter is None or self.adapter.slot is None else self.adapter.slot

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - len(self.prompt_ids)

    @property
    def todo(self) -> int:
        """Committed tokens whose KV is not computed."""
        return len(self.token_ids) - self.computed

    @property
    def room(self) -> int:
        """Draft levels that max_tokens and the context leave beside the bonus token."""
        return max(0, self.limit - len(self.token_ids) - 1)

    @property
    def at_limit(self) -> bool:
        return len(self.token_ids) >= self.limit

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of its prompt are still to be computed."""
        return self.prompt_logprobs is not None and self.scored < len(self.prompt_ids) - 1

    def positions_to_score(self, start: int, stop: int) -> range:
        """Of the positions ``start..stop-1`` those whose logits are log-probabilities still wanted.

        The logits at a position are about the token after it.
        """
        if not self.scores_prompt:
            return range(0)
        return range(max(start, self.scored), min(stop, len(self.prompt_ids) - 1))

    @property
    def draft_lag(self) -> int:
        """Entries the draft layers are behind what a feed of this step's tokens would continue."""
        return max(0, self.computed - min(self.own)) if self.own else 0

    @property
    def behind(self) -> int:
        """Tokens to be computed again before it may be drafted for, where the proposer rested."""
        return max(1, len(self.token_ids) - min(self.own)) if self.rests else 0

    def wake(self) -> None:
        """It is fed again, from where its entries end."""
        self.rests = False
        self.adopt_entries()

    def adopt_entries(self) -> None:
        """Count as own the draft entries that another request wrote into blocks both of them hold."""
        if self.draft_lag:
            shared = self.table.drafted_slots
            self.draft_floor = max(self.draft_floor, shared)
            self.own = [max(length, min(shared, self.computed)) for length in self.own]

    @property
    def prompt_computed(self) -> bool:
        return self.computed >= len(self.prompt_ids)

    @property
    def waits_for_leader(self) -> bool:
        """Completions after the first are admitted when the first one's prompt is in the prefix cache."""
        leader = self.leader
        if leader is None or self.admitted or leader.status is Status.FINISHED:
            return False
        return not (leader.status is Status.RUNNING and leader.prompt_computed)

    def commit(self, tokens: Sequence[int]) -> None:
        """Take ``tokens`` as drawn."""
        self.token_ids.extend(tokens)
        if self.history is not None:
            self.history.extend(tokens)
        if self.grammar is not None:
            self.grammar.advance(tokens)

    def drop_kv(self) -> None:
        """Give all blocks back and forget what derived from them."""
        self.table.release()
        self.computed = self.target_floor = self.draft_floor = 0
        self.own = [0] * len(self.own)
        self.rests = False
        self.drafts = NO_DRAFTS
