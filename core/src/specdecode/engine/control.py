"""How many drafts a request may have: the policy that is the same for every method."""

from __future__ import annotations

import attrs

from .request import Request


@attrs.frozen(kw_only=True)
class DraftPolicy:
    """``disable_by_batch_size``: no drafting while this many requests or more run."""

    width: int
    disable_by_batch_size: int | None = None

    def budget(self, request: Request, num_running: int) -> int:
        """Most drafts ``request`` may be given in this step."""
        if self.disable_by_batch_size is not None and num_running >= self.disable_by_batch_size:
            return 0
        wish = request.params.speculation
        if wish is None:
            return self.width
        return min(self.width, int(wish))  # False is 0
