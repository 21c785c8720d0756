"""What is shown to a proposer that goes on from another's drafts."""

import numpy as np
import pytest
import torch
from specdecode.contract import Drafts, Needs, Place, StepView, Tokens, Undeclared
from specdecode.engine.continuing import Continued, behind

TEXTS = [[3, 4, 5, 6], [7, 8]]


class Source:
    """Two rows of which the second has room for one more token."""

    width = 5

    def rows(self, name, place):
        value = {
            "committed_len": np.array([4, 2]),
            "room": np.array([9, 1]),
            "budget": np.array([5, 5]),
            "last_token": np.array([6, 8]),
        }
        if name == "history":
            rows = [[*text, *[0] * (4 - len(text))] for text in TEXTS]
            return torch.tensor(rows, dtype=torch.int32) if place is Place.DEVICE else TEXTS
        return torch.from_numpy(value[name]) if place is Place.DEVICE else value[name]

    def limit(self, name, value, bound, place):
        return value.clamp(max=bound) if place is Place.DEVICE else np.minimum(value, bound)

    def drafts(self, needs):
        return None

    def behind(self, name, drafts, place):
        return behind(self, name, drafts, place)


def chains(ids, lens, place):
    ids, lens = np.array(ids), np.array(lens)
    if place is Place.DEVICE:
        ids, lens = torch.from_numpy(ids), torch.from_numpy(lens)
    return Drafts(ids=ids, lens=lens, parents=None, score=None)


def shown(view):
    """Each row as it reads: its history up to its length, and the rest."""
    history = [list(map(int, view.history[row][: int(view.committed_len[row])])) for row in range(2)]
    return history, view.last_token.tolist(), view.room.tolist(), view.drafted.tolist()


def needs(place, **more):
    child = Needs(width=4, depth=4, tokens=Tokens.HISTORY, place=place, **{"continues": True, **more})
    return Needs.union(child, child, child)


@pytest.mark.parametrize("drafted_on", Place)
@pytest.mark.parametrize("place", Place)
def test_drafts_stand_in_the_text(place, drafted_on):
    view = StepView(needs(place), Source())
    assert view.drafted is None
    first = chains([[1, 2, 9], [5, 9, 9]], [2, 1], drafted_on)
    child, _ = view.for_child(1, after=first)
    assert shown(child) == ([[3, 4, 5, 6, 1, 2], [7, 8, 5]], [2, 5], [4, 0], [2, 1])
    # The rest of the view is the step's.
    assert view.for_child(1)[0].drafted is None and view.committed_len.tolist() == [4, 2]


@pytest.mark.parametrize("place", Place)
def test_chains_behind_chains(place):
    inner = needs(place)
    outer = StepView(Needs.union(inner, inner), Source())
    child, _ = outer.for_child(1, after=chains([[1, 2], [9, 9]], [2, 0], place))
    grandchild, _ = child.for_child(0, after=chains([[4], [5]], [1, 1], place))
    assert shown(grandchild) == ([[3, 4, 5, 6, 1, 2, 4], [7, 8, 5]], [4, 5], [4, 0], [3, 1])


def test_only_to_who_declares_it():
    view = StepView(needs(Place.HOST, continues=False), Source())
    with pytest.raises(Undeclared, match="child 1 does not declare continues=True"):
        view.for_child(1, after=chains([[1], [1]], [1, 1], Place.HOST))


@pytest.mark.parametrize("place", Place)
def test_budgets_of_children(place):
    """An integer is known to the host on either side; values are where reading them waits for nobody."""
    view = StepView(needs(place), Source())
    idle, _ = view.for_child(0, 0)
    assert idle.width == 0 and idle.budget.tolist() == [0, 0]
    some, _ = view.for_child(0, 3)
    assert some.width == 3 and some.budget.tolist() == [3, 3]
    given = np.array([1, 2]) if place is Place.HOST else torch.tensor([1, 2])
    told, _ = view.for_child(0, given)
    assert told.budget.tolist() == [1, 2] and told.width == (2 if place is Place.HOST else 4)


def test_a_continued_text_reads_as_a_list():
    text, whole = Continued([3, 4, 5], [6, 7]), [3, 4, 5, 6, 7]
    assert len(text) == 5 and list(text) == whole and text[-1] == 7 and text[1] == 4 and 6 in text
    for start in (None, *range(-6, 7)):
        for stop in (None, *range(-6, 7)):
            for step in (None, 1, 2, -1):
                assert text[start:stop:step] == whole[start:stop:step]
    with pytest.raises(IndexError):
        text[5]
