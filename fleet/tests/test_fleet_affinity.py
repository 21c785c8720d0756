"""Who is remembered to have a prefix."""

from __future__ import annotations

import pytest

pytest.importorskip("ray", reason="no Ray")

from specdec_fleet.affinity import MAX_HOLDERS, PrefixMap


def test_the_longest_known_prefix_decides():
    prefixes = PrefixMap(4, 100)
    prefixes.note(prefixes.keys(range(8), ""), "a")
    prefixes.note(prefixes.keys([*range(8), *range(50, 58)], ""), "b")
    ask = prefixes.keys([*range(8), *range(50, 54), 1, 2, 3, 4], "")
    assert prefixes.holders(ask, {"a", "b"}) == ["b"]
    assert prefixes.holders(ask, {"a"}) == ["a"], "who is gone is passed over"
    assert prefixes.holders(prefixes.keys(range(8), ""), {"a", "b"}) == ["b", "a"], "the latest first"


def test_what_differs_early_has_nothing_in_common():
    prefixes = PrefixMap(4, 100)
    prefixes.note(prefixes.keys(range(12), ""), "a")
    assert prefixes.holders(prefixes.keys([9, *range(1, 12)], ""), {"a"}) == []
    assert prefixes.holders(prefixes.keys(range(12), "salt"), {"a"}) == [], "namespaces share nothing"
    assert prefixes.keys(range(3), "") == [], "too short to be remembered"


def test_the_least_used_are_forgotten():
    prefixes = PrefixMap(1, 4)
    old, new = prefixes.keys([1, 2, 3], ""), prefixes.keys([7, 8, 9], "")
    prefixes.note(old, "a")
    prefixes.note(new, "b")
    assert prefixes.holders(new, {"b"}) == ["b"]
    assert prefixes.holders(old[:2], {"a"}) == []


def test_few_holders_are_remembered():
    prefixes = PrefixMap(1, 10)
    names = [str(number) for number in range(MAX_HOLDERS + 3)]
    for name in names:
        prefixes.note(prefixes.keys([5], ""), name)
    assert prefixes.holders(prefixes.keys([5], ""), set(names)) == names[: -MAX_HOLDERS - 1 : -1]
