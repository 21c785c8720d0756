"""Ray Serve's choice of a replica: who has the prompt's prefix if that is cheap, else who has least to do."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from .affinity import PrefixMap
from .messages import Ask, Order, Question
from .presence import announce

#: Replicas that are looked at more closely, by asking for their queues where those are not known.
MAX_CANDIDATES = 8
#: Blocks of prefixes that are remembered: four million tokens at the default size.
CAPACITY = 1 << 16


class AffinityRouter(RequestRouter):
    """Lives beside the handle of the replicas, in the door."""

    def initialize_state(self, **kwargs: Any) -> None:
        """
        Args:
            block: tokens of a prefix that is remembered; 0: none are.
            slack: requests that the holder of a prefix may have more than the least busy replica.
        """
        block, slack = kwargs["block"], kwargs["slack"]
        self._prefixes = PrefixMap(block, CAPACITY) if block else None
        self._slack = slack
        self._open: dict[str, str] = {}  # Serve's id of a request -> replica that works on it
        self._load: Counter[str] = Counter()
        announce(self.app_name, lambda: [replica.unique_id for replica in list(self.curr_replicas)])

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Groups of replicas, the most wanted first; none: wait for other replicas."""
        first = pending_request.args[0] if pending_request is not None and pending_request.args else None
        ask = first if isinstance(first, Ask) else None
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        fit = {
            name: replica
            for replica in candidate_replicas
            if _may_take(first, name := replica.replica_id.unique_id)
        }
        if not fit:
            return []
        loads = {name: self._load_of(name, replica) for name, replica in fit.items()}
        by_load = sorted(fit, key=lambda name: (loads[name], random.random()))
        groups = [[fit[name] for name in by_load[:MAX_CANDIDATES]]]
        if ask is not None and self._prefixes is not None:
            keys = self._prefixes.keys(ask.prompt.token_ids, ask.namespace)
            if holders := self._prefixes.holders(keys, fit):
                best = min(holders, key=loads.__getitem__)
                if loads[best] <= loads[by_load[0]] + self._slack:
                    groups.insert(0, [fit[best]])
        return groups

    def _load_of(self, name: str, replica: RunningReplica) -> int:
        """Requests that a replica works on: of this door, or of all as it said last."""
        return max(self._load[name], self.replica_queue_len_cache.get(replica.replica_id) or 0)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        ask = pending_request.args[0] if pending_request.args else None
        if not isinstance(ask, Ask):
            return
        name = replica_id.unique_id
        self._open[pending_request.metadata.internal_request_id] = name
        self._load[name] += 1
        if self._prefixes is not None:
            self._prefixes.note(self._prefixes.keys(ask.prompt.token_ids, ask.namespace), name)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        name = self._open.pop(internal_request_id, None)
        if name is not None:
            self._load[name] -= 1
            if self._load[name] <= 0:
                del self._load[name]


def _may_take(first: Any, replica: str) -> bool:
    """Whether a call whose first argument is ``first`` may go to ``replica``."""
    match first:
        case Ask() | Question():
            return replica not in first.avoid
        case Order():
            return replica == first.replica
    return True
