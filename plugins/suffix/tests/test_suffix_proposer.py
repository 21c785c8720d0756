"""The proposer through the contract: what it drafts, within which limits, and what it keeps."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import attrs
import numpy as np
import pytest
from specdec_suffix import backends
from specdec_suffix.confidence import confidences, trust
from specdec_suffix.config import SuffixConfig
from specdec_suffix.drafting import Draft
from specdec_suffix.plugin import specdecode_proposers
from specdec_suffix.proposer import within_room
from specdecode.config.structure import structure
from specdecode.contract import (
    API,
    ConfigError,
    Drafts,
    Memory,
    Place,
    Proposer,
    RequestInfo,
    Shape,
    StepView,
    Tokens,
    Unsupported,
)

TARGET = SimpleNamespace(target=SimpleNamespace(vocab_size=300))
(SPEC,) = specdecode_proposers()


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
    config: SuffixConfig
    proposer: Proposer

    @property
    def needs(self):
        return SPEC.needs(self.config, TARGET)

    def add(self, request_id, prompt_len, namespace="", resumed=False):
        self.proposer.on_add(
            RequestInfo(
                id=request_id,
                namespace=namespace,
                token_ids=(),
                prompt_len=prompt_len,
                params=None,
                resumed=resumed,
            )
        )

    def step(self, histories, budget=None, room=None):
        needs, rows = self.needs, len(histories)
        out = Drafts(
            ids=np.full((rows, needs.width), -1, np.int64),
            lens=np.zeros(rows, np.int64),
            parents=np.tile(np.arange(-1, needs.width - 1), (rows, 1)),
            score=np.zeros((rows, needs.width), np.float32),
        )
        source = Rows(histories, budget or [99] * rows, room or [99] * rows)
        self.proposer.propose(StepView(needs, source), out)
        return out

    def drafts(self, histories, **limits):
        out = self.step(histories, **limits)
        return [ids[:n].tolist() for ids, n in zip(out.ids, out.lens, strict=True)]


def harness(**keys):
    config = SuffixConfig(**{"backend": "python"} | keys)
    return Harness(config, SPEC.build(config, TARGET))


def test_the_spec_declares_what_it_reads_and_no_more():
    needs = harness().needs
    assert (SPEC.name, SPEC.api, SPEC.config, SPEC.imports) == ("suffix", API, SuffixConfig, ())
    assert (needs.width, needs.depth, needs.shape) == (24, 24, Shape.CHAIN)
    assert (needs.tokens, needs.place, needs.memory) == (Tokens.HISTORY, Place.HOST, Memory.NAMESPACE)
    assert not (needs.taps or needs.modules or needs.kv or needs.scratch_bytes or needs.graphs)
    needs = harness(num_speculative_tokens=9, suffix_decoding_use_tree_spec=True).needs
    assert (needs.width, needs.depth, needs.shape) == (9, 9, Shape.TREE)
    needs = harness(suffix_decoding_use_tree_spec=True, suffix_decoding_max_tree_depth=5).needs
    assert (needs.width, needs.depth) == (5, 4)  # a token at least is matched


def test_fields_and_defaults_are_vllms():
    config = SuffixConfig()
    assert config.suffix_decoding_max_tree_depth == config.length == 24
    assert config.suffix_decoding_max_cached_requests == 10_000
    assert config.suffix_decoding_max_spec_factor == 1.0
    assert config.suffix_decoding_min_token_prob == 0.1


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("suffix_decoding_max_tree_depth", 1),
        ("suffix_decoding_max_tree_depth", 2000),
        ("suffix_decoding_max_tree_depth", 2.5),
        ("suffix_decoding_max_cached_requests", -1),
        ("suffix_decoding_max_cached_tokens", -1),
        ("suffix_decoding_max_spec_factor", -0.1),
        ("suffix_decoding_max_spec_factor", float("inf")),
        ("suffix_decoding_max_spec_factor", float("nan")),
        ("suffix_decoding_min_token_prob", 1.1),
        ("suffix_decoding_min_token_prob", "0.1"),
        ("suffix_decoding_use_tree_spec", 1),
        ("suffix_decoding_share_namespaces", "yes"),
        ("suffix_decoding_cache_path", 3),
        ("num_speculative_tokens", 0),
        ("backend", "cuda"),
        ("suffix_decoding_max_tree_dept", 8),
    ],
)
def test_bad_values_are_refused_by_field_and_value(key, value):
    with pytest.raises(ConfigError) as caught:
        structure(SuffixConfig, {key: value}, "speculative_config")
    assert f"speculative_config.{key}" in str(caught.value)
    assert repr(value) in str(caught.value) or "did you mean" in str(caught.value)


# -- drafts ---------------------------------------------------------------------------------------
def test_drafts_what_followed_in_prompt_and_output():
    engine = harness()
    engine.add("r", prompt_len=5)
    assert engine.drafts({"r": [1, 2, 3, 4, 5]}) == [[]]  # its prompt is being computed
    assert engine.drafts({"r": [1, 2, 3, 4, 5, 1, 2]}) == [[3, 4]]
    assert engine.drafts({"r": [1, 2, 3, 4, 5, 1, 2, 9, 1, 2, 9]})[0][0] == 1


def test_past_outputs_are_drafted_from_in_their_namespace():
    engine = harness()
    engine.add("a", prompt_len=2, namespace="alice")
    engine.drafts({"a": [90, 91, 1, 2, 3, 4, 5, 6]}, budget=[0])  # its last step is learnt as well
    engine.proposer.on_finish("a", "stop")
    for name, namespace, drafted in (("b", "alice", [4, 5, 6]), ("c", "bob", []), ("d", "", [])):
        engine.add(name, prompt_len=1, namespace=namespace)
        assert engine.drafts({name: [50, 1, 2, 3]}) == [drafted]
    assert engine.proposer.metrics()["cached_requests"] == 1


@pytest.mark.parametrize("keys", [{}, {"suffix_decoding_use_tree_spec": True}], ids=["chain", "tree"])
@pytest.mark.parametrize(
    ("budget", "room", "length"), [(0, 9, 0), (2, 9, 2), (9, 1, 1), (9, 0, 0), (3, 2, 2), (9, 9, 4)]
)
def test_drafts_stay_within_budget_and_room(budget, room, length, keys):
    engine = harness(**keys)
    engine.add("r", prompt_len=9)
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4]
    assert len(engine.drafts({"r": text}, budget=[budget], room=[room])[0]) == length


def test_a_tree_is_cut_to_its_room_with_its_parents():
    draft = Draft([1, 2, 3, 4, 5], [-1, 0, -1, 1, 2], [1.0, 0.5, 0.5, 0.5, 0.2], 2.7, 3)
    cut = within_room(draft, 2)
    assert ([*cut.token_ids], [*cut.parents]) == ([1, 2, 3, 5], [-1, 0, -1, 2])
    assert [*cut.probs] == [1.0, 0.5, 0.5, 0.2]
    assert within_room(draft, 3) is draft


def test_a_tree_is_written_with_its_parents():
    engine = harness(suffix_decoding_use_tree_spec=True, suffix_decoding_max_spec_factor=3.0)
    text = [1, 2, 3, 9, 1, 2, 4, 8, 1, 2]
    engine.add("r", prompt_len=8)
    out = engine.step({"r": text})
    ids, parents = (part[0, : out.lens[0]].tolist() for part in (out.ids, out.parents))
    assert {(parent, token) for parent, token in zip(parents, ids, strict=True)} >= {(-1, 3), (-1, 4)}


def test_rows_do_not_disturb_each_other_and_steps_may_be_missed():
    rng = np.random.default_rng(0)
    text = rng.integers(0, 3, 200).tolist()
    together, alone = harness(), harness()
    for engine, names in ((together, "ab"), (alone, "a")):
        for name in names:
            engine.add(name, prompt_len=10, namespace=name)
    for length in (10, 11, 15, 16, 40, 41, 150, 200):
        mine = text[:length]
        other = text[: max(11, length // 2)]
        both = together.drafts({"b": other, "a": mine} if length % 2 else {"a": mine, "b": other})
        assert alone.drafts({"a": mine})[0] in both
    fresh = harness()
    fresh.add("a", prompt_len=10, namespace="a")
    assert fresh.drafts({"a": text}) == alone.drafts({"a": text})


def test_a_preempted_request_goes_on_where_it_was():
    engine = harness()
    engine.add("r", prompt_len=4)
    before = engine.drafts({"r": [1, 2, 3, 4, 1, 2]})
    engine.proposer.on_preempt("r")
    engine.add("r", prompt_len=4, resumed=True)
    assert engine.drafts({"r": [1, 2, 3, 4, 1, 2]}) == before == [[3, 4]]
    engine.proposer.on_finish("r", "stop")
    assert engine.proposer.metrics()["cached_tokens"] == 2  # read once


def test_h30_a_request_id_may_come_again_after_an_abort():
    engine = harness(suffix_decoding_max_cached_requests=2)
    for turn in range(6):
        engine.add("same", prompt_len=1)
        engine.drafts({"same": [9, turn, turn + 1]})
        engine.proposer.on_finish("same", "abort")
        engine.proposer.on_finish("same", "abort")
    metrics = engine.proposer.metrics()
    assert (metrics["cached_requests"], metrics["evicted_requests"]) == (2, 4)
    assert (metrics["cached_tokens"], metrics["evicted_tokens"]) == (4, 8)


# -- confidence -----------------------------------------------------------------------------------
def test_confidence_grows_with_the_match_and_falls_along_the_path():
    assert 0 < trust(1) < trust(2) < trust(8) < 1
    engine, scores = harness(), {}
    for length in (1, 3, 6):
        engine.add(f"r{length}", prompt_len=9, namespace=str(length))
        text = [*range(10, 19), *range(10, 10 + length)]
        out = engine.step({f"r{length}": text})
        scores[length] = out.score[0, : out.lens[0]].tolist()
        assert len(scores[length]) > 0 and sorted(scores[length], reverse=True) == scores[length]
    assert 0 < scores[1][0] < scores[3][0] < scores[6][0] < 1
    assert sum(scores[1]) < sum(scores[3])  # what a cascade may expect of it


def test_confidence_of_a_tree_follows_each_path():
    draft = Draft([1, 2, 3], [-1, -1, 1], [0.6, 0.4, 0.4], 1.4, 2)
    assert confidences(draft) == pytest.approx([0.6 * trust(2), 0.4 * trust(2), 0.4 * trust(2) * trust(3)])


# -- backends and files ---------------------------------------------------------------------------
def without_arctic(monkeypatch):
    monkeypatch.setattr(backends, "find_spec", lambda name: None)


def test_h22_arctic_without_its_package_is_refused_before_anything_is_loaded(monkeypatch):
    without_arctic(monkeypatch)
    with pytest.raises(Unsupported, match=r"pip install 'specdec-suffix\[arctic\]'"):
        SPEC.needs(SuffixConfig(backend="arctic"), TARGET)
    assert SPEC.needs(SuffixConfig(), TARGET).width == 24
    assert backends.cache_class("auto").__name__ == "PythonCache"


def test_a_package_that_cannot_be_imported_is_told(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "specdec_suffix.arctic", None)
    monkeypatch.setattr(backends, "find_spec", lambda name: object())
    assert backends.cache_class("auto").__name__ == "PythonCache"
    assert "trees in Python are used instead" in caplog.text
    with pytest.raises(Unsupported, match="installed but cannot be imported"):
        backends.cache_class("arctic")


def test_auto_takes_arctic_where_it_is():
    pytest.importorskip("arctic_inference", reason="arctic-inference is not installed")
    assert backends.cache_class("auto").__name__ == "ArcticCache"
    assert backends.cache_class("python").__name__ == "PythonCache"


def test_outputs_live_on_in_a_file(tmp_path):
    path = tmp_path / "outputs.npz"
    engine = harness(suffix_decoding_cache_path=str(path))
    engine.add("a", prompt_len=1)
    engine.add("b", prompt_len=1, namespace="bob")
    engine.drafts({"a": [90, 1, 2, 3, 4, 5, 6], "b": [90, 7, 8, 9]})
    engine.proposer.on_finish("a", "stop")
    engine.proposer.close()  # the other one is being written: what there is of it is saved
    engine.proposer.close()
    again = harness(suffix_decoding_cache_path=str(path))
    assert again.proposer.metrics()["cached_requests"] == 2
    again.add("c", prompt_len=1)
    again.add("d", prompt_len=1, namespace="bob")
    assert again.drafts({"c": [50, 1, 2, 3], "d": [50, 7, 8]}) == [[4, 5, 6], [9]]


def test_bad_files_are_refused_before_anything_is_loaded(tmp_path):
    def refused(path, match):
        with pytest.raises(ConfigError, match=match):
            SPEC.needs(SuffixConfig(suffix_decoding_cache_path=str(path)), TARGET)

    refused(tmp_path, "is a folder")
    refused(tmp_path / "no" / "outputs.npz", "cannot be written")
    (tmp_path / "damaged").write_bytes(b"PK\x03\x04 and no more")
    refused(tmp_path / "damaged", "is damaged, or no file that suffix decoding saved")
    harness(suffix_decoding_cache_path=str(tmp_path / "small.npz")).proposer.close()
    other = SimpleNamespace(target=SimpleNamespace(vocab_size=128))
    with pytest.raises(ConfigError, match="vocabulary of 300, the target has 128"):
        SPEC.needs(SuffixConfig(suffix_decoding_cache_path=str(tmp_path / "small.npz")), other)


def test_a_file_that_cannot_be_written_at_the_end_is_told(tmp_path, caplog):
    folder = tmp_path / "gone"
    folder.mkdir()
    engine = harness(suffix_decoding_cache_path=str(folder / "outputs.npz"))
    folder.rmdir()
    engine.proposer.close()
    assert "could not be saved" in caplog.text
