"""Which replica has computed the beginning of a prompt. Pure: no Ray here."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence

#: Replicas that are remembered for one prefix.
MAX_HOLDERS = 8


class PrefixMap:
    """Remembers who was sent which prefixes, in blocks of tokens; the least used are forgotten.

    It is a guess: what a replica has dropped from its cache since is not known here, and costs it a
    prompt computed again.
    """

    def __init__(self, block: int, capacity: int) -> None:
        """
        Args:
            block: tokens; prompts shorter than this have no prefixes.
            capacity: blocks that are remembered.
        """
        self._block = block
        self._capacity = capacity
        self._holders: OrderedDict[int, tuple[str, ...]] = OrderedDict()  # the latest first

    def keys(self, token_ids: Sequence[int], namespace: str) -> list[int]:
        """A key for each whole block of a prompt: of all tokens up to its end, and of the namespace."""
        keys, key = [], hash(namespace)
        for end in range(self._block, len(token_ids) + 1, self._block):
            key = hash((key, *token_ids[end - self._block : end]))
            keys.append(key)
        return keys

    def holders(self, keys: Sequence[int], among: Collection[str]) -> list[str]:
        """Who of ``among`` has the longest known prefix; nobody if none is known."""
        for key in reversed(keys):
            if found := [name for name in self._holders.get(key, ()) if name in among]:
                return found
        return []

    def note(self, keys: Sequence[int], replica: str) -> None:
        """``replica`` was sent a prompt."""
        for key in keys:
            others = [name for name in self._holders.pop(key, ()) if name != replica]
            self._holders[key] = (replica, *others[: MAX_HOLDERS - 1])
        while len(self._holders) > self._capacity:
            self._holders.popitem(last=False)
