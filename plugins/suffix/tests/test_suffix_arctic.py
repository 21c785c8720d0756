"""The tree in Python and arctic-inference's: for the same calls the same drafts, to the last bit."""

from __future__ import annotations

import io
import keyword
import tokenize
from importlib.util import find_spec
from pathlib import Path

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from specdec_suffix.cache import PythonCache
from specdec_suffix.drafting import Limits

pytestmark = pytest.mark.skipif(
    find_spec("arctic_inference") is None,
    reason="arctic-inference is not installed: pip install 'specdec-suffix[arctic]'",
)

LIMITS = st.builds(
    Limits,
    most=st.sampled_from([1, 2, 5, 9, 30]),
    factor=st.sampled_from([0.0, 0.4, 1.0, 1.3, 2.5, 7.0]),
    min_prob=st.sampled_from([0.0, 0.1, 0.2, 0.3, 0.5, 1.0]),
    tree=st.booleans(),
)


class Both:
    """Every call goes to both caches, and every draft is compared."""

    def __init__(self, depth: int, keep: bool) -> None:
        from specdec_suffix.arctic import ArcticCache

        self._caches = PythonCache(depth, keep), ArcticCache(depth, keep)
        self.texts: dict[int, list[int]] = {}  # running requests
        self.ended: list[int] = []
        self.drafted = 0
        self._serial = 0

    def start(self, prompt: list[int]) -> None:
        self._all("start", self._serial, prompt)
        self.texts[self._serial] = [*prompt]
        self._serial += 1

    def extend(self, key: int, tokens: list[int]) -> None:
        self.texts[key] += tokens
        self._all("extend", key, tokens)

    def stop(self, key: int) -> None:
        self._all("stop", key)
        del self.texts[key]
        self.ended.append(key)

    def remember(self, tokens: list[int]) -> None:
        self._all("remember", self._serial, tokens)
        self.ended.append(self._serial)
        self._serial += 1

    def forget(self, place: int) -> None:
        self._all("forget", self.ended.pop(place))

    def speculate(self, key: int, limits: Limits, ahead: list[int] | None = None) -> None:
        """Behind the text of a request, and what another method expects ``ahead`` of it."""
        mine, theirs = self._all("speculate", key, self.texts[key] + (ahead or []), limits)
        assert [*mine.token_ids] == [*theirs.token_ids]
        assert [*mine.parents] == [*theirs.parents]
        assert [*mine.probs] == [*theirs.probs]
        assert mine.score == theirs.score
        if len(mine.token_ids):
            assert mine.match_len == theirs.match_len
            self.drafted += 1

    def _all(self, method: str, *arguments: object) -> list:
        return [getattr(cache, method)(*arguments) for cache in self._caches]


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_random_streams(data):
    """Requests side by side, that copy from each other, end, and are forgotten in any order."""
    draw = data.draw
    both = Both(depth=draw(st.sampled_from([2, 3, 5, 8, 24])), keep=draw(st.booleans()))
    tokens = st.lists(st.integers(0, draw(st.sampled_from([1, 2, 4, 9]))), min_size=1, max_size=6)
    for _ in range(draw(st.integers(1, 30))):
        action = draw(
            st.sampled_from(["start", "extend", "extend", "copy", "copy", "stop", "forget", "remember"])
        )
        if action == "start" or (action in ("extend", "copy", "stop") and not both.texts):
            both.start(draw(st.lists(st.integers(0, 4), max_size=12)))
            both.extend(max(both.texts), draw(tokens))
        elif action == "remember":
            both.remember(draw(tokens))
        elif action == "forget":
            if both.ended:
                both.forget(draw(st.integers(0, len(both.ended) - 1)))
        else:
            key = draw(st.sampled_from(sorted(both.texts)))
            if action == "stop":
                both.stop(key)
            else:
                source = both.texts[draw(st.sampled_from(sorted(both.texts)))]
                start = draw(st.integers(0, max(0, len(source) - 1)))
                both.extend(key, draw(tokens) if action == "extend" else source[start : start + 5] or [0])
        for key in both.texts:
            both.speculate(key, draw(LIMITS))
            both.speculate(key, draw(LIMITS), ahead=draw(tokens))


def source_tokens(path: Path) -> list[int]:
    """A real stream: the words and signs of a Python file, numbered as they come."""
    ids: dict[str, int] = {word: number for number, word in enumerate(keyword.kwlist)}
    stream = io.StringIO(path.read_text(encoding="utf-8"))
    return [ids.setdefault(t.string, len(ids)) for t in tokenize.generate_tokens(stream.readline)]


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_real_streams(tree):
    """Source code as the outputs of requests, three at a time; at most six are remembered."""
    both = Both(depth=16, keep=True)
    text = source_tokens(Path(tokenize.__file__))
    pieces = [text[start : start + 300] for start in range(0, 3600, 300)]
    limits = Limits(most=16, factor=1.0, min_prob=0.1, tree=tree)
    for group in range(0, len(pieces), 3):
        lot = pieces[group : group + 3]
        base = both._serial
        for piece in lot:
            both.start(piece[:40])
        for at in range(40, 300, 4):
            for offset, piece in enumerate(lot):
                both.extend(base + offset, piece[at : at + 4])
                both.speculate(base + offset, limits)
                both.speculate(base + offset, attrs.evolve(limits, factor=3.0, min_prob=0.02))
        for offset in range(len(lot)):
            both.stop(base + offset)
        while len(both.ended) > 6:
            both.forget(0)
    assert both.drafted > 500
