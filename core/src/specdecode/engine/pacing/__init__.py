"""How much to draft: from what was accepted, what a step costs, and nothing else. Knows no torch."""

from .acceptance import Acceptance, Verified
from .choice import Choice, best_lengths, best_width, draft_widths
from .costs import DraftCosts, StepCosts
from .curve import MeasuredCurve
from .pacer import REASONS, Pacer
from .resting import Gaps
from .scores import ScoreScale

__all__ = [
    "REASONS", "Acceptance", "Choice", "DraftCosts", "Gaps", "MeasuredCurve", "Pacer", "ScoreScale",
    "StepCosts", "Verified", "best_lengths", "best_width", "draft_widths",
]  # fmt: skip
