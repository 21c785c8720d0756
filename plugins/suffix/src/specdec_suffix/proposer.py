"""Suffix decoding as a proposer: learns what requests write, and drafts how it went on before."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs
from specdecode.contract import Drafts, Proposer, RequestInfo, StepView

from .backends import cache_class
from .confidence import confidences
from .config import SuffixConfig
from .drafting import Draft, Limits
from .memory import Memory, Writer

logger = logging.getLogger(__name__)


@attrs.define(eq=False)
class _Request:
    """A request, from its admission to its end."""

    namespace: str
    prompt_len: int
    writer: Writer | None = None  #: None until it is first proposed for with output of its own

    def read(self, memory: Memory, text: Sequence[int], length: int) -> Writer | None:
        """Learn what is new in the first ``length`` tokens of ``text``; None while its prompt is computed."""
        if length <= self.prompt_len:
            return None
        if self.writer is None:
            self.writer = memory.begin(self.namespace, text[: self.prompt_len])
        known = self.prompt_len + len(self.writer.tokens)
        if known < length:
            memory.extend(self.writer, text[known:length])
        return self.writer


class SuffixProposer(Proposer):
    """Drafts what followed the longest, likeliest suffix of a request's text (arXiv 2411.04975).

    All state derives from tokens: it survives a preemption, and catches up with a request's history after
    steps that it was not asked in. A request that is never proposed for costs nothing and is not remembered.
    """

    def __init__(self, config: SuffixConfig, vocab_size: int) -> None:
        self._config = config
        self._vocab_size = vocab_size
        depth, kept = config.suffix_decoding_max_tree_depth, config.remembers
        self._memory = Memory(
            functools.partial(cache_class(config.backend), depth, kept),
            max_outputs=config.suffix_decoding_max_cached_requests,
            max_tokens=config.suffix_decoding_max_cached_tokens,
            shared=config.suffix_decoding_share_namespaces,
        )
        self._depth = depth
        self._requests: dict[str, _Request] = {}
        self._counts = dict.fromkeys(("lookups", "hits", "matched_tokens"), 0)
        self._open = True
        if config.suffix_decoding_cache_path is not None:
            from .storage import load_file

            self._memory.restore(load_file(config, vocab_size))

    def on_add(self, request: RequestInfo) -> None:
        if request.id not in self._requests:
            self._requests[request.id] = _Request(request.namespace, request.prompt_len)

    def on_finish(self, request_id: str, reason: str) -> None:
        request = self._requests.pop(request_id, None)
        if request is not None and request.writer is not None:
            self._memory.end(request.writer)

    def propose(self, step: StepView, out: Drafts) -> None:
        budgets, rooms = step.budget.tolist(), step.room.tolist()
        drafted = step.drafted  # of another, to be gone on from and not to be learnt
        for row, (request_id, text) in enumerate(zip(step.request_ids, step.history, strict=True)):
            length = len(text) if drafted is None else len(text) - int(drafted[row])
            writer = self._requests[request_id].read(self._memory, text, length)
            budget, room = budgets[row], rooms[row]
            if writer is None or min(budget, room) < 1:
                continue
            draft = self._draft(writer, text, budget, room)
            count = len(draft.token_ids)
            self._counts["lookups"] += 1
            if count:
                self._counts["hits"] += 1
                self._counts["matched_tokens"] += draft.match_len
                out.ids[row, :count] = draft.token_ids
                out.parents[row, :count] = draft.parents
                out.score[row, :count] = confidences(draft)
                out.lens[row] = count

    def _draft(self, writer: Writer, text: Sequence[int], budget: int, room: int) -> Draft:
        config = self._config
        limits = Limits(
            most=budget if config.suffix_decoding_use_tree_spec else min(budget, room),
            factor=config.suffix_decoding_max_spec_factor,
            min_prob=config.suffix_decoding_min_token_prob,
            tree=config.suffix_decoding_use_tree_spec,
        )
        draft = self._memory.speculate(writer, text[-self._depth :], limits)
        return within_room(draft, room) if limits.tree else draft

    def metrics(self) -> Mapping[str, float]:
        memory = self._memory
        return {
            **{name: float(count) for name, count in self._counts.items()},
            "cached_requests": float(memory.num_outputs),
            "cached_tokens": float(memory.num_tokens),
            "cached_namespaces": float(memory.num_spaces),
            "evicted_requests": float(memory.evicted_outputs),
            "evicted_tokens": float(memory.evicted_tokens),
        }

    def close(self) -> None:
        """Save, where the config says so, what was remembered and what is being written; then forget it."""
        if not self._open:
            return
        self._open = False
        for request_id in list(self._requests):
            self.on_finish(request_id, "close")
        if self._config.suffix_decoding_cache_path is not None:
            self._save(Path(self._config.suffix_decoding_cache_path))
        self._memory.clear()

    def _save(self, path: Path) -> None:
        from .storage import origin_of, save

        try:
            save(path, self._memory.outputs(), origin_of(self._config, self._vocab_size))
        except OSError as error:  # an engine that ends has nobody to raise to
            logger.error("remembered outputs could not be saved to %s: %s", path, error)


def within_room(draft: Draft, room: int) -> Draft:
    """The nodes of a tree that are at most ``room`` levels deep."""
    levels: list[int] = []
    for parent in draft.parents:
        levels.append(1 if parent < 0 else levels[parent] + 1)
    kept = [node for node, level in enumerate(levels) if level <= room]
    if len(kept) == len(levels):
        return draft
    place = {node: index for index, node in enumerate(kept)} | {-1: -1}
    return attrs.evolve(
        draft,
        token_ids=[draft.token_ids[node] for node in kept],
        parents=[place[draft.parents[node]] for node in kept],
        probs=[draft.probs[node] for node in kept],
    )
