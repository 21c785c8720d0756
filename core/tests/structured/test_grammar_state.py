"""The state of a grammar: drafts are looked at and taken back, masks are those of a fresh matcher."""

from __future__ import annotations

import random

import numpy as np
import pytest
from specdecode.sampling.mask import TokenMask
from specdecode.structured import StructuredOutputsParams
from specdecode.structured.state import GrammarState

VOCAB, EOS = 300, 2
GRAMMARS = (
    {"regex": "(ab|a|b{2,4}c)+[0-9]*"},
    {"choice": ["ab", "abc", "b", "bcd"]},
    {"grammar": 'root ::= "a" root "b" | "c" | root "d"'},
    {"json": {"type": "array", "items": {"enum": ["a", "bb", 1, 12]}, "maxItems": 4}},
)


def ids(mask: TokenMask | None) -> list[int] | None:
    return None if mask is None else mask.to_array(VOCAB).nonzero()[0].tolist()


def fresh(compiler, fields, drawn) -> GrammarState:
    """A state that saw ``drawn`` one by one and never a draft."""
    state = compiler.start(StructuredOutputsParams(**fields))
    for token in drawn:
        state.advance([token])
    return state


@pytest.mark.parametrize("fields", GRAMMARS, ids=lambda fields: next(iter(fields)))
def test_trees_of_drafts_leave_no_trace(compiler, fields):
    rng = random.Random(5)
    accepted = 0
    for _ in range(25):
        state = compiler.start(StructuredOutputsParams(**fields))
        drawn: list[int] = []
        while state.end is None and len(drawn) < 14:
            tokens, parents, paths = [], [], [[]]
            for node in range(rng.randrange(8)):
                parent = rng.randrange(-1, node)
                likely = ids(fresh(compiler, fields, [*drawn, *paths[parent + 1]]).mask) or [7]
                tokens.append(rng.choice(likely) if rng.random() < 0.8 else rng.randrange(VOCAB))
                parents.append(parent)
                paths.append([*paths[parent + 1], tokens[-1]])
            masks = state.masks(tokens, parents)
            legal = [True]
            for node, parent in enumerate(parents):
                above = masks[parent + 1]
                legal.append(legal[parent + 1] and above is not None and tokens[node] in above)
            for mask, path, reachable in zip(masks, paths, legal, strict=True):
                want = fresh(compiler, fields, [*drawn, *path]).mask if reachable else None
                assert ids(mask) == ids(want), (drawn, path)
            node = rng.choice([place for place, fine in enumerate(legal) if fine])
            bonus = [rng.choice(ids(masks[node]))] if masks[node] is not None else [rng.randrange(VOCAB)]
            accepted += len(paths[node])
            drawn += [*paths[node], *bonus]
            state.advance([*paths[node], *bonus])
            assert state.end == fresh(compiler, fields, drawn).end
    assert accepted > 20


def test_where_it_ends(compiler, tokenizer):
    state = compiler.start(StructuredOutputsParams(regex="[0-9]{3}"))
    one, two, letter = tokenizer.encode("12x", add_special_tokens=False)
    masks = state.masks([one, two, one, letter, EOS], [-1, 0, 1, 2, 2])
    assert [mask is None for mask in masks] == [False, False, False, True, True, True]
    state.advance([one, two, one, letter])
    assert state.end == 3 and state.mask is None and state.masks([one], [-1]) == [None, None]
    state.advance([letter, EOS])  # a step that was under way
    assert state.end == 3 and state.why_nothing(()) is None


def test_an_end_of_sequence_token_ends_it_where_the_text_may_end(compiler, tokenizer):
    (a,) = tokenizer.encode("a", add_special_tokens=False)
    state = compiler.start(StructuredOutputsParams(regex="a+"))
    assert ids(state.mask) == [a]
    assert [ids(mask) for mask in state.masks([EOS, a, EOS, a], [-1, -1, 1, 2])] == [
        [a],
        None,
        [EOS, a],
        None,
        None,
    ]
    state.advance([a, EOS])
    assert state.end == 2
    on = compiler.start(StructuredOutputsParams(regex="a+"), may_stop=False)
    on.advance([a])
    assert ids(on.mask) == [a] and on.end is None


def test_each_place_is_computed_once(compiler, tokenizer, monkeypatch):
    a, b = tokenizer.encode("ab", add_special_tokens=False)
    state = compiler.start(StructuredOutputsParams(regex="(a|b)+"))
    looked = []
    look = state._look
    monkeypatch.setattr(state, "_look", lambda path: looked.append(path) or look(path))
    state.masks([a, a, b, a], [-1, 0, 0, -1])  # two siblings are the same draft
    assert looked == [(), (a,), (a, a), (a, b)]
    state.advance([a, b, b])
    assert looked[4:] == [(a, b, b)]
    state.masks([b], [-1])
    assert looked[5:] == [(b,)]


@pytest.mark.parametrize("may_stop", [True, False])
@pytest.mark.parametrize("fields", GRAMMARS, ids=lambda fields: next(iter(fields)))
def test_the_first_place_is_computed_once_a_grammar(compiler, tokenizer, fields, may_stop, monkeypatch):
    compiler.check(StructuredOutputsParams(**fields))
    computed = []
    compute = GrammarState._compute
    monkeypatch.setattr(
        GrammarState, "_compute", lambda state, path: computed.append(path) or compute(state, path)
    )
    for _ in range(2):
        state = compiler.start(StructuredOutputsParams(**fields), may_stop=may_stop)
        first = state.mask
        assert computed == [] and state.why_nothing(()) is None
    without = GrammarState(state._template, VOCAB, [EOS], may_stop=may_stop)
    assert ids(without.mask) == ids(first) and computed == [()]
    for one in (state, without):
        one.advance(ids(first)[:1])
    assert ids(state.mask) == ids(without.mask)


def test_an_error_on_a_drafts_path_is_forgotten_with_the_draft(compiler, tokenizer):
    """Errors of the library are for ever, and drafts must not leave any."""
    from llguidance import LLMatcher, LLParserLimits

    vocabulary = compiler._vocabulary()
    many = " | ".join(f'"{n}" "!"' for n in range(100, 160))
    template = LLMatcher(
        vocabulary,
        f'start: "a" | "b" many\nmany: {many}',
        log_level=0,
        limits=LLParserLimits(max_items_in_row=30),
    )
    state = GrammarState(template, VOCAB, [EOS], may_stop=True)
    a, b = tokenizer.encode("ab", add_special_tokens=False)
    masks = state.masks([b, a], [-1, -1])
    assert ids(masks[0]) == [a, b] and ids(masks[1]) == []
    assert "max is 30" in state.why_nothing([b]) and "\n" not in state.why_nothing([b])
    assert masks[2] is None and state.why_nothing(()) is None
    state.advance([a])
    assert state.end == 1


def test_a_token_that_was_not_allowed_is_told_of(compiler, tokenizer):
    state = compiler.start(StructuredOutputsParams(regex="[0-9]{3}"))
    state.advance(tokenizer.encode("1x", add_special_tokens=False))
    assert ids(state.mask) == [] and "x" in state.why_nothing(())


def test_masks():
    raw = np.packbits(np.arange(300) % 7 == 3, bitorder="little").tobytes() + b"\xff\xff"
    mask = TokenMask.of(raw, 300)
    assert ids(mask) == list(range(3, 300, 7)) and 3 in mask and 4 not in mask and mask
    assert ids(mask.without([3, 4, 17])) == [n for n in range(3, 300, 7) if n not in (3, 17)]
    assert ids(TokenMask.of(b"\xff" * 40, 299)) == list(range(299))
    assert not TokenMask.none(300) and ids(TokenMask.none(300)) == []
    with pytest.raises(ValueError, match="38"):
        TokenMask.of(b"\xff" * 37, 300)
