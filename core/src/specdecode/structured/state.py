"""One completion's place in its grammar: what may come next, after its tokens and after each draft."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import attrs

from specdecode.sampling.mask import TokenMask

if TYPE_CHECKING:
    from llguidance import LLMatcher

Path = tuple[int, ...]


@attrs.frozen(eq=False)
class Place:
    """A place in the grammar: what may come next."""

    allowed: TokenMask
    complete: bool = False  #: nothing can follow but an end-of-sequence token
    fault: str | None = None  #: why nothing is allowed though the text is not complete


class GrammarState:
    """Follows the drawn tokens of one completion; drafts are looked at and taken back.

    What may come next is a function of the tokens before it and of nothing else, so that drafts
    cannot change it. Each place is computed once: the one behind an accepted draft is what the next
    step begins with.

    The grammar *ends* where nothing but an end-of-sequence token can follow. The output is complete
    then, and no token has to be drawn to say so.
    """

    def __init__(
        self,
        template: LLMatcher,
        vocab_size: int,
        eos_ids: Iterable[int],
        *,
        may_stop: bool,
        first: TokenMask | None = None,
    ) -> None:
        """
        Args:
            template: at the beginning of the grammar; it is only copied.
            first: what ``template`` allows, which is the same for all that begin; None: not known yet.
            eos_ids: the tokens that ``template`` takes for the end.
            may_stop: whether an end-of-sequence token may be drawn where the text may end; else the
                output goes on while the grammar can.
        """
        self.end: int | None = None  #: tokens of the output, counted to the one that ended the grammar
        self._template = template
        self._first = first
        self.vocab_size = vocab_size
        self._eos_ids = frozenset(eos_ids)
        self._may_stop = may_stop
        self._drawn: list[int] = []
        self._matcher = template.deep_copy()  # after the drawn tokens, and then
        self._beyond: Path = ()  # these
        self._places: dict[Path, Place] = {}  # by what stands behind the drawn tokens

    @property
    def mask(self) -> TokenMask | None:
        """What may be drawn next; None for anything, the output being complete."""
        return None if self.end is not None else self._place(()).allowed

    def masks(self, ids: Sequence[int], parents: Sequence[int]) -> list[TokenMask | None]:
        """What may be drawn next, and after each node of a chain or tree of drafts.

        Returns:
            One more than there are nodes. None where it does not matter: behind the end of the
            grammar, and behind a draft that the grammar forbids, which is never accepted.
        """
        found = [self.mask]
        paths: list[Path] = [()]
        for token, parent in zip(ids, parents, strict=True):
            before, path = found[parent + 1], (*paths[parent + 1], token)
            paths.append(path)
            legal = before is not None and token in before and token not in self._eos_ids
            place = self._place(path) if legal else None
            found.append(None if place is None or place.complete else place.allowed)
        return found

    def advance(self, tokens: Sequence[int]) -> None:
        """Take drawn tokens for good; those behind the end of the grammar are passed over."""
        path: Path = ()
        for token in tokens:
            if self.end is not None:
                return
            path = (*path, token)
            if token in self._eos_ids or self._place(path).complete:
                self.end = len(self._drawn) + len(path)
        if self.end is None and path:
            self._seek(path)
            self._drawn += path
            self._beyond = ()
            self._places = {
                known[len(path) :]: place
                for known, place in self._places.items()
                if known[: len(path)] == path
            }

    def why_nothing(self, path: Sequence[int]) -> str | None:
        """Why no token is allowed after the drawn ones and ``path``; None if some are."""
        if self.end is not None:
            return None
        place = self._place(tuple(path))
        if place.allowed or place.complete:
            return None
        return place.fault or "no token of the vocabulary goes on from here"

    # -- the matcher ----------------------------------------------------------------------------
    def _place(self, path: Path) -> Place:
        if path not in self._places:
            self._places[path] = self._look(path)
        return self._places[path]

    def _look(self, path: Path) -> Place:
        at_first = not path and not self._drawn
        mask = self._first if at_first and self._first is not None else self._compute(path)
        if self._matcher.is_error():
            # A matcher never leaves this state, to which a draft that was not accepted may have brought it.
            self._begin_anew()
            mask = self._compute(path)
        if self._matcher.is_error():
            return Place(TokenMask.none(self.vocab_size), fault=told(self._matcher.get_error()))
        text = mask.without(self._eos_ids)
        if not text:
            return Place(text, complete=self._matcher.is_accepting())
        return Place(mask if self._may_stop else text)

    def _compute(self, path: Path) -> TokenMask:
        self._seek(path)
        return TokenMask.of(self._matcher.compute_bitmask(), self.vocab_size)

    def _begin_anew(self) -> None:
        self._matcher = self._template.deep_copy()
        self._matcher.consume_tokens(self._drawn)
        self._beyond = ()

    def _seek(self, path: Path) -> None:
        both = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(self._beyond, path, strict=False))
        shared = sum(1 for _ in both)
        if back := len(self._beyond) - shared:
            self._matcher.rollback(back)
        if more := path[shared:]:
            self._matcher.consume_tokens(list(more))
        self._beyond = path


def told(error: str) -> str:
    """An error of the library on one line, without its parser's state and what points into the text."""
    lines = (line.strip() for line in error.split("\n<state>")[0].splitlines())
    text = " ".join(line for line in lines if line and not re.fullmatch(r"\^+|\d+ \|.*", line))
    return re.sub(r"^at \d+\(\d+\): ", "", text)
