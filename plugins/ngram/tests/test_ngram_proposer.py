"""The proposer through the contract: what it drafts, within which limits, and what it keeps."""

from types import SimpleNamespace

import attrs
import numpy as np
import pytest
from specdec_ngram.config import NgramConfig
from specdec_ngram.plugin import specdecode_proposers
from specdecode.contract import API, Drafts, Place, Proposer, RequestInfo, Shape, StepView, Tokens

ON_CPU = SimpleNamespace(target=SimpleNamespace(device="cpu"))


@attrs.define
class Rows:
    """A StepSource for host proposers: rows by name."""

    histories: dict
    budget: list
    room: list

    def rows(self, name, place):
        assert place is Place.HOST
        if name == "request_ids":
            return list(self.histories)
        if name == "history":
            return list(self.histories.values())
        return np.asarray(getattr(self, name), np.int64)

    def limit(self, name, value, bound, place):
        return np.minimum(value, bound)


@attrs.define
class Harness:
    """A proposer with the requests it has been told of."""

    spec: object
    config: NgramConfig
    proposer: Proposer

    @property
    def needs(self):
        return self.spec.needs(self.config, ON_CPU)

    def add(self, request_id, token_ids=(), resumed=False):
        self.proposer.on_add(
            RequestInfo(
                id=request_id,
                namespace="",
                token_ids=token_ids,
                prompt_len=len(token_ids),
                params=None,
                resumed=resumed,
            )
        )

    def drafts(self, histories, budget=None, room=None):
        rows, width = len(histories), self.needs.width
        out = Drafts(
            ids=np.full((rows, width), -1, np.int64),
            lens=np.zeros(rows, np.int64),
            parents=np.tile(np.arange(-1, width - 1), (rows, 1)),
            score=np.zeros((rows, width), np.float32),
        )
        source = Rows(histories, budget or [width] * rows, room or [width] * rows)
        self.proposer.propose(StepView(self.needs, source), out)
        return [ids[:n].tolist() for ids, n in zip(out.ids, out.lens, strict=True)]

    def draft(self, history, **limits):
        """Of one request that is added and finished for it."""
        self.add("one", history)
        drafts = self.drafts({"one": history}, **limits)[0]
        self.proposer.on_finish("one", "stop")
        return drafts


def harness(k=4, **bounds):
    (spec,) = specdecode_proposers()
    config = NgramConfig(num_speculative_tokens=k, **bounds)
    return Harness(spec, config, spec.build(config, SimpleNamespace(needs=spec.needs(config, ON_CPU))))


def test_the_spec_declares_what_it_reads_and_no_more():
    engine = harness(k=7)
    assert (engine.spec.name, engine.spec.api, engine.spec.config) == ("ngram", API, NgramConfig)
    needs = engine.needs
    assert (needs.width, needs.depth, needs.shape) == (7, 7, Shape.CHAIN)
    assert (needs.tokens, needs.place) == (Tokens.HISTORY, Place.HOST)
    assert not (needs.taps or needs.modules or needs.kv or needs.scratch_bytes)


def test_h15_drafts_what_followed_the_match():
    engine = harness(k=4, prompt_lookup_min=2, prompt_lookup_max=3)
    assert engine.draft([1, 2, 3, 9, 8, 1, 2, 3]) == [9, 8, 1, 2]


def test_h15_nothing_where_no_window_matches():
    assert harness(prompt_lookup_min=4, prompt_lookup_max=4).draft([1, 2, 3, 9, 8, 1, 2, 3]) == []
    assert harness(prompt_lookup_min=2).draft([1, 2, 3, 9, 2]) == []


def test_a_match_that_runs_into_the_end_goes_round():
    assert harness(k=5, prompt_lookup_max=1).draft([6, 6]) == [6] * 5
    assert harness(k=5, prompt_lookup_max=3).draft([1, 2, 3, 1, 2, 3]) == [1, 2, 3, 1, 2]
    assert harness(k=5, prompt_lookup_max=1).draft([9, 1, 2, 1]) == [2, 1, 2, 1, 2]


@pytest.mark.parametrize(("matching", "length"), [(1, 1), (2, 1), (3, 2), (4, 4), (5, 8), (6, 20), (9, 20)])
def test_a_short_match_is_trusted_with_few_drafts(matching, length):
    repeated = [*range(100, 100 + matching)]
    text = [*repeated, *range(40), 7, *repeated]
    assert len(harness(k=20, prompt_lookup_min=1, prompt_lookup_max=6).draft(text)) == length


@pytest.mark.parametrize("prompt", [[5], [5, 5], [5] * 40, [5, 6], []])
def test_h16_odd_prompts(prompt):
    drafts = harness(k=3, prompt_lookup_max=2).draft(prompt)
    assert drafts == ([5] * 3 if len(prompt) > 2 else [])


@pytest.mark.parametrize(
    ("budget", "room", "length"), [(0, 9, 0), (2, 9, 2), (9, 1, 1), (9, 0, 0), (3, 2, 2)]
)
def test_drafts_stay_within_budget_and_room(budget, room, length):
    assert (
        len(harness(k=4, prompt_lookup_max=2).draft([1, 2, 3, 1, 2], budget=[budget], room=[room])) == length
    )


def test_rows_do_not_see_each_other():
    engine = harness(k=2, prompt_lookup_max=2)
    for name in "abc":
        engine.add(name)
    histories = {"a": [1, 2, 3, 4, 1, 2], "b": [3, 4, 9, 1, 2], "c": [7, 8, 9, 7, 8]}
    assert engine.drafts(histories) == [[3, 4], [], [9, 7]]
    reordered = {name: histories[name] for name in "cab"}
    assert engine.drafts(reordered) == [[9, 7], [3, 4], []]


def test_drafts_follow_a_growing_history_whatever_steps_were_skipped():
    text = [int(t) for t in np.random.default_rng(0).integers(0, 4, 300)]
    engine, fresh = harness(k=3), harness(k=3)
    engine.add("r", text[:10])
    for length in (10, 11, 15, 16, 40, 41, 200, 300):
        assert engine.drafts({"r": text[:length]})[0] == fresh.draft(text[:length])


def test_a_preempted_request_goes_on_where_it_was():
    text = [1, 2, 3, 4, 1, 2]
    engine = harness(k=2, prompt_lookup_max=2)
    engine.add("r", text)
    assert engine.drafts({"r": text}) == [[3, 4]]
    engine.proposer.on_preempt("r")
    engine.add("r", [*text, 3], resumed=True)
    assert engine.drafts({"r": [*text, 3]}) == [[4, 1]]


def test_a_finished_request_leaves_nothing_behind():
    engine = harness(k=2)
    for turn in range(50):
        engine.add(f"r{turn}", [1, 1, 1])
        engine.drafts({f"r{turn}": [1, 1, 1]})
        if turn % 2:
            engine.proposer.on_preempt(f"r{turn}")
        engine.proposer.on_finish(f"r{turn}", "abort")
        engine.proposer.on_finish(f"r{turn}", "abort")
    assert engine.proposer._indexes == {}


def test_a_request_that_may_not_draft_is_not_indexed():
    engine = harness()
    engine.add("r", [1, 2, 1, 2])
    engine.drafts({"r": [1, 2, 1, 2]}, budget=[0])
    assert engine.proposer.metrics() == {"lookups": 0, "hits": 0}
    assert not engine.proposer._indexes["r"]._next


def test_metrics_tell_how_often_something_matched():
    engine = harness()
    engine.draft([1, 2, 1, 2, 1])
    engine.draft([1, 2, 3, 4, 5])
    assert engine.proposer.metrics() == {"lookups": 2, "hits": 1}
    engine.proposer.close()
    engine.proposer.close()
