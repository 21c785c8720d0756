"""Shows which tokens of an output came as accepted drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specdecode.api.segments import Segment

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

#: Colour of accepted drafts, and what stands around them where there is none.
DRAFT_STYLE = "green"
DRAFT_MARKS = ("«", "»")


def marked(pieces: Sequence[Segment], *, colour: bool) -> Text:
    """Accepted drafts in colour, or between marks."""
    from rich.text import Text

    opening, closing = ("", "") if colour else DRAFT_MARKS
    text = Text()
    for piece in pieces:
        if piece.drafted:
            text.append(f"{opening}{piece.text}{closing}", style=DRAFT_STYLE if colour else "")
        else:
            text.append(piece.text)
    return text


def shows_colour(console: Console) -> bool:
    """Whether colour would be seen: a terminal that has it, and no ``NO_COLOR``."""
    return console.is_terminal and console.color_system is not None and not console.no_color


def legend(console: Console) -> Text:
    """What the marks mean."""
    pieces = [Segment("accepted draft tokens", True), Segment(" look like this", False)]
    return marked(pieces, colour=shows_colour(console))


def print_marked(console: Console, pieces: Sequence[Segment], *, end: str = "\n") -> None:
    """Print a text with its accepted drafts marked, never re-wrapped or interpreted as markup."""
    console.print(marked(pieces, colour=shows_colour(console)), soft_wrap=True, highlight=False, end=end)
