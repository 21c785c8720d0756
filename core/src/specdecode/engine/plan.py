"""What one step computes. Knows no torch."""

from __future__ import annotations

import attrs

from .request import NO_DRAFTS, Request, RowDrafts


@attrs.frozen(eq=False)
class RowPlan:
    """One request's share of a step: ``new`` committed tokens from ``start`` on, then its drafts."""

    request: Request
    start: int
    new: int
    drafts: RowDrafts = NO_DRAFTS
    catch_up: int = 0  #: draft entries behind, to be fed beside this step's

    @property
    def num_tokens(self) -> int:
        """Target positions computed."""
        return self.new + len(self.drafts)

    @property
    def samples(self) -> bool:
        """Whether the last committed token is computed, so that the row draws a token."""
        return self.start + self.new == len(self.request.token_ids)

    @property
    def prefill(self) -> bool:
        return self.start < len(self.request.prompt_ids)


@attrs.frozen(eq=False)
class StepPlan:
    """The rows of a step, in batch order."""

    rows: list[RowPlan] = attrs.Factory(list)

    @property
    def serves(self) -> bool:
        """Whether any row is not in the background."""
        return any(not row.request.background for row in self.rows)

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)
