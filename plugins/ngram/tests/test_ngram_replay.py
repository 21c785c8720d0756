"""The replay behind the README's tables measures what the plugin does."""

import importlib.util
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from specdec_ngram.index import NgramIndex
from specdec_ngram.proposer import continuation


@pytest.fixture(scope="module")
def replay():
    path = Path(__file__).parents[1] / "benchmarks" / "replay.py"
    spec = importlib.util.spec_from_file_location("ngram_replay", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@settings(deadline=None)
@given(text=st.lists(st.integers(0, 3), min_size=1, max_size=40), k=st.integers(1, 12))
def test_the_chosen_rule_is_the_plugins(replay, text, k):
    index = NgramIndex(2, 5)
    index.extend(text)
    match = index.match(text)
    _, starts = replay.Occurrences(2, 5).find(text)
    drafts = replay.RULES[replay.CHOSEN](text, starts, k) if starts else []
    assert drafts == ([] if match is None else continuation(text, match[0], k))


def test_a_replay_counts_steps_and_tokens(replay):
    # The prompt's step gives 1. Then 2 3 1 are drafted and accepted, and the target adds 2. The last
    # step has one token left to write, and so no room for a draft.
    text = {"prompt": [1, 2, 3], "output": [1, 2, 3, 1, 2, 9]}
    tally = replay.replay([text], replay.RULES["recent-cycle"], 1, 5, 3)
    assert (tally.steps, tally.tokens, tally.drafts) == (2, 5, 1)
    assert (tally.drafted, tally.accepted, tally.acceptance_length) == (3, 3, 4)
