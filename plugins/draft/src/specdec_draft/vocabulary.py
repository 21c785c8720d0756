"""Which ids of a draft mean which ids of the target: told by their tokenizers, without torch."""

from __future__ import annotations

import itertools
from pathlib import Path

import attrs
from specdecode.contract import TokenizerEntries, Unsupported
from specdecode.heads.tokenizers import first_difference, read_entries

#: The draft's id that stands for a target's id which it does not know. What it drafts behind one may be
#: poor; it is never wrong, since the target verifies it.
STRANGER = 0


@attrs.frozen(eq=False)
class Vocabulary:
    """The ids of a target of ``len(drafts)`` logits in a draft's eyes."""

    #: for each id of the target: the draft's id of the same token, or -1: never drafted
    drafts: tuple[int, ...] = attrs.field(repr=False)
    #: for each id of the target: what the draft is fed for it
    feeds: tuple[int, ...] = attrs.field(repr=False)

    @property
    def shared(self) -> int:
        """How many ids of the target can be drafted."""
        return sum(own >= 0 for own in self.drafts)


def match_vocabularies(target: Path, draft: Path, target_size: int, draft_size: int) -> Vocabulary:
    """Find for each id of the target the draft's id of the same token.

    Sizes are those of the models' logits, which may be padded beyond their tokenizers: ids that either
    tokenizer lacks are never drafted. A draft may have the same ids and fewer or more of them, or a reduced
    vocabulary: some of the target's tokens in the target's order, numbered anew. A control token that is
    another's is not drafted.

    Args:
        target, draft: the models' directories.
        target_size, draft_size: rows of their embeddings.

    Raises:
        Unsupported: the tokenizers differ; names the first entry that does.
        ConfigError: a tokenizer's file cannot be read.
    """
    same = draft.resolve() == target.resolve()
    ours, theirs = (None, None) if same else (read_entries(target), read_entries(draft))
    if ours is None or theirs is None:
        if target_size != draft_size:
            lacking = target if ours is None else draft
            raise Unsupported(
                f"the draft has {draft_size} tokens and the target {target_size}, and {lacking} has no "
                "tokenizer.json or vocab.json that would tell which are the same; put one there"
            )
        return _numbered_alike(range(target_size), target_size, draft_size)
    odd = first_difference(ours, theirs)
    if odd is None:
        alike = [i for i, token in ours.tokens.items() if theirs.tokens.get(i) == token]
        return _numbered_alike(alike, target_size, draft_size)
    reduced = _reduced(ours, theirs)
    if reduced is None:
        raise Unsupported(
            f"the draft's tokenizer is not the target's: id {odd} is {ours.tokens[odd]!r} in {target} and "
            f"{theirs.tokens[odd]!r} in {draft}; use a draft of the same model family"
        )
    own = {here: there for here, there in reduced if here < target_size and there < draft_size}
    drafts = tuple(own.get(i, -1) for i in range(target_size))
    return Vocabulary(drafts, tuple(STRANGER if i < 0 else i for i in drafts))


def _numbered_alike(alike: range | list[int], target_size: int, draft_size: int) -> Vocabulary:
    known = {i for i in alike if i < min(target_size, draft_size)}
    if not known:
        raise Unsupported("draft and target have no token in common; use a draft of the same model family")
    return Vocabulary(
        tuple(i if i in known else -1 for i in range(target_size)),
        tuple(i if i < draft_size else STRANGER for i in range(target_size)),  # padding rows take their own
    )


def _reduced(ours: TokenizerEntries, theirs: TokenizerEntries) -> list[tuple[int, int]] | None:
    """(target id, draft id) of a smaller vocabulary in the target's order; None if it is no such."""
    if len(theirs.tokens) >= len(ours.tokens):
        return None
    ids = {token: i for i, token in ours.tokens.items()}
    pairs = [(ids.get(token, -1), there) for there, token in sorted(theirs.tokens.items())]
    rising = all(left < right for (left, _), (right, _) in itertools.pairwise(pairs))
    return pairs if rising and pairs[0][0] >= 0 else None
