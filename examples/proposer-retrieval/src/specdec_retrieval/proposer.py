"""The method itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specdecode.contract import Drafts, Proposer, StepView

from .config import RetrievalConfig
from .datastore import Datastore
from .drafting import Draft, chance, most_frequent
from .suffix_array import SuffixArray


class RetrievalProposer(Proposer):
    """Drafts how past answers went on where they read like the end of a request's text.

    REST (He et al., arXiv 2311.08252): the longest end of the text that occurs in the datastore, then the
    most frequent continuations of it. The datastore is only read, and nothing is kept of a request.
    """

    def __init__(self, config: RetrievalConfig, store: Datastore) -> None:
        self._config = config
        self._num_tokens, self._num_answers = store.num_tokens, store.num_answers
        self._index: SuffixArray | None = SuffixArray(store.text, store.order)
        self._counts = dict.fromkeys(("lookups", "hits", "matched_tokens"), 0)

    def propose(self, step: StepView, out: Drafts) -> None:
        for row, history in enumerate(step.history):
            # budget: most drafts of this row in this step, 0 while its prompt is computed;
            # room: levels left before its max_tokens or the end of its context.
            budget, room = int(step.budget[row]), int(step.room[row])
            if min(budget, room) > 0:
                draft = self._draft(history, budget, room)
                count = len(draft.token_ids)
                out.ids[row, :count] = draft.token_ids
                out.parents[row, :count] = draft.parents
                out.score[row, :count] = draft.scores
                out.lens[row] = count

    def _draft(self, history: Sequence[int], budget: int, room: int) -> Draft:
        config, index = self._config, self._index
        if index is None:
            return Draft()
        match = index.longest(history[-config.retrieval_match_max :], config.retrieval_match_min)
        self._counts["lookups"] += 1
        if match is None:
            return Draft()
        self._counts["hits"] += 1
        self._counts["matched_tokens"] += match.length
        return most_frequent(
            index.continuations(match, min(budget, room), config.retrieval_max_matches),
            chance(match.length),
            most=budget,
            least_score=config.retrieval_min_score,
            tree=config.retrieval_tree,
        )

    def metrics(self) -> Mapping[str, float]:
        return {
            **{name: float(count) for name, count in self._counts.items()},
            "datastore_tokens": float(self._num_tokens),
            "datastore_answers": float(self._num_answers),
        }

    def close(self) -> None:
        self._index = None  # with it goes what was mapped
