"""How many drafts a request may have: the policy that is the same for every method."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from .pacing import Pacer
from .request import Request


@attrs.frozen(kw_only=True)
class DraftPolicy:
    """Most drafts of each request, by what was asked for and by what pays."""

    width: int
    disable_by_batch_size: int | None = None  #: no drafting while so many requests or more run
    #: ``(low, high, drafts)`` with ``low..high`` requests running; what lies between two goes on as before
    per_batch_size: Sequence[tuple[int, int, int]] | None = None
    pacer: Pacer | None = None  #: chooses within the rest

    def limit(self, request: Request, num_running: int) -> int:
        """Most drafts that ``request`` may ever be given while so many run."""
        if self.disable_by_batch_size is not None and num_running >= self.disable_by_batch_size:
            return 0
        most = self._scheduled(num_running)
        wish = request.params.speculation
        return most if wish is None else min(most, int(wish))  # False is 0

    def budget(self, request: Request, num_running: int) -> int:
        """Most drafts ``request`` may be given in this step."""
        if request.rests:
            return 0
        limit = self.limit(request, num_running)
        return limit if self.pacer is None else min(limit, self.pacer.length(request))

    def _scheduled(self, num_running: int) -> int:
        if self.per_batch_size is None:
            return self.width
        scheduled = (k for low, _, k in reversed(self.per_batch_size) if low <= num_running)
        return min(next(scheduled, self.width), self.width)
