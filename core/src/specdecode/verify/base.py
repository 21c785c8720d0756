"""What a rule of verification is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import attrs


@attrs.frozen
class Verdict:
    """What a step adds to one request."""

    accepted: tuple[int, ...]  #: indices of the accepted nodes, from the root down
    tokens: tuple[int, ...]  #: their ids, and one more that the target drew after the last of them


class Rule(Protocol):
    """A rule that needs the target's own draws and nothing else: no probabilities, no randomness.

    Rules that weigh the drafter's probabilities against the target's will be a second protocol.
    """

    def __call__(self, targets: Sequence[int], ids: Sequence[int], parents: Sequence[int]) -> Verdict: ...
