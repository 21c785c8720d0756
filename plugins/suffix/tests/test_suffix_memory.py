"""What is remembered of requests that ended: whose, how much, and through a file."""

from __future__ import annotations

import os
import pickle
import stat
from array import array

import numpy as np
import pytest
from specdec_suffix import storage
from specdec_suffix.cache import PythonCache
from specdec_suffix.drafting import Limits
from specdec_suffix.memory import Memory, Output, digest
from specdecode.contract import ConfigError

LIMITS = Limits(most=8, factor=1.0, min_prob=0.1)
ORIGIN = storage.Origin(vocab_size=100, shared=False)


def memory(max_outputs=10, max_tokens=1000, shared=False, depth=8):
    return Memory(
        lambda: PythonCache(depth, max_outputs > 0 and max_tokens > 0),
        max_outputs=max_outputs,
        max_tokens=max_tokens,
        shared=shared,
    )


def write(kept, tokens, namespace="", prompt=(90,)):
    """One request from beginning to end."""
    writer = kept.begin(namespace, prompt)
    kept.extend(writer, tokens)
    kept.end(writer)


def drafted(kept, text, namespace=""):
    """What is drafted behind ``text`` for a new request."""
    writer = kept.begin(namespace, text[:1])
    kept.extend(writer, text[1:])
    ids = [*kept.speculate(writer, text, LIMITS).token_ids]
    kept.end(writer)
    return ids


def test_a_later_request_drafts_from_an_earlier_output_but_not_from_its_prompt():
    kept = memory()
    write(kept, [1, 2, 3, 4, 5, 6], prompt=[20, 21, 22, 23])
    assert drafted(kept, [50, 1, 2, 3]) == [4, 5, 6]
    assert drafted(kept, [50, 20, 21]) == []


def test_a_running_request_drafts_from_a_running_neighbour():
    kept = memory()
    first, second = kept.begin("", [90]), kept.begin("", [91])
    kept.extend(first, [1, 2, 3, 4])
    kept.extend(second, [1, 2])
    assert [*kept.speculate(second, [91, 1, 2], LIMITS).token_ids] == [3, 4]


def test_drafts_go_on_from_what_another_method_expects():
    kept = memory()
    writer = kept.begin("", [1, 2, 3, 4, 5, 6, 7])
    kept.extend(writer, [1, 2])
    assert [*kept.speculate(writer, [7, 1, 2], LIMITS).token_ids] == [3, 4]
    assert [*kept.speculate(writer, [7, 1, 2, 3, 4], LIMITS).token_ids] == [5, 6, 7, 1]
    assert [*kept.speculate(writer, [7, 1, 2, 3, 9], LIMITS).token_ids] == []
    assert [*kept.speculate(writer, [7, 1, 2], LIMITS).token_ids] == [3, 4]


def test_namespaces_do_not_see_each_other_unless_they_are_shared():
    text = [1, 2, 3, 4, 5, 6]
    kept = memory()
    write(kept, text, "alice")
    assert drafted(kept, [50, 1, 2, 3], "bob") == drafted(kept, [50, 1, 2, 3], "") == []
    assert drafted(kept, [50, 1, 2, 3], "alice") == [4, 5, 6]
    kept = memory(shared=True)
    write(kept, text, "alice")
    assert drafted(kept, [50, 1, 2, 3], "bob") == [4, 5, 6]
    assert kept.num_spaces == 1


def test_the_oldest_is_forgotten_first_whatever_its_namespace():
    kept = memory(max_outputs=3)
    for number, namespace in enumerate("aabcb"):
        write(kept, [number * 10 + step for step in range(5)], namespace)
    assert (kept.num_outputs, kept.evicted_outputs, kept.evicted_tokens) == (3, 2, 10)
    assert kept.num_spaces == 2  # nothing is left of the first
    assert [output.tokens[0] for output in kept.outputs()] == [20, 30, 40]
    probe = Limits(most=3, factor=1.0, min_prob=0.1)
    writer = kept.begin("b", [99])
    kept.extend(writer, [20, 21])
    assert [*kept.speculate(writer, [99, 20, 21], probe).token_ids] == [22, 23]


def test_tokens_are_bounded_as_well():
    kept = memory(max_tokens=25)
    for number in range(10):
        write(kept, [number * 7 + step for step in range(7)])
        assert kept.num_tokens <= 25
    assert (kept.num_outputs, kept.num_tokens, kept.evicted_outputs) == (3, 21, 7)
    write(kept, range(26))  # longer than all that may be kept
    assert (kept.num_outputs, kept.num_tokens, kept.num_spaces) == (0, 0, 0)


@pytest.mark.parametrize("bounds", [{"max_outputs": 0}, {"max_tokens": 0}])
def test_h30_bounds_of_0_leave_a_request_its_own_text(bounds):
    kept = memory(**bounds)
    write(kept, [1, 2, 3, 4])
    assert drafted(kept, [50, 1, 2]) == []
    assert drafted(kept, [1, 2, 3, 4, 1, 2]) == [3, 4]
    assert (kept.num_outputs, kept.evicted_outputs, kept.num_spaces) == (0, 0, 0)


def test_h30_running_requests_are_never_forgotten():
    kept = memory(max_outputs=2)
    writers = [kept.begin("", [90]) for _ in range(6)]
    for number, writer in enumerate(writers):
        kept.extend(writer, [number * 10 + step for step in range(4)])
    assert (kept.num_outputs, kept.evicted_outputs) == (0, 0)
    for number, writer in enumerate(writers):
        start = number * 10
        kept.extend(writer, [start, start + 1])
        context = [start, start + 1, start + 2, start + 3, start, start + 1]
        assert [*kept.speculate(writer, context, LIMITS).token_ids] == [start + 2, start + 3]
    for writer in writers:
        kept.end(writer)
    assert (kept.num_outputs, kept.evicted_outputs) == (2, 4)


def test_h30_many_distinct_requests_leave_a_bounded_tree():
    def nodes(tree):
        waiting, count = [tree.root], 0
        while waiting:
            count += 1
            waiting += [c for c in waiting.pop().children.values() if not isinstance(c, int)]
        return count

    rng = np.random.default_rng(0)
    kept = memory(max_outputs=5)
    sizes = []
    for _ in range(200):
        write(kept, rng.integers(0, 6, 30).tolist())
        ((space,),) = [kept._spaces.values()]
        sizes.append(nodes(space.cache._outputs))
    assert kept.num_outputs == 5 and kept.num_tokens == 150
    assert max(sizes) <= 2 * 150


# -- files ------------------------------------------------------------------------------------------
def outputs():
    return [
        Output(digest("alice"), array("i", [1, 2, 3, 4, 5, 6])),
        Output(digest(""), array("i", [7, 8, 9, 99])),
        Output(digest("alice"), array("i", [1, 2, 3, 8])),
    ]


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "outputs.npz"
    storage.save(path, outputs(), ORIGIN)
    return path


def test_what_is_saved_is_loaded_in_its_order_and_namespaces(saved):
    assert storage.load(saved, ORIGIN) == outputs()
    kept = memory()
    kept.restore(storage.load(saved, ORIGIN))
    assert kept.outputs() == outputs()
    assert drafted(kept, [50, 7, 8]) == [9, 99]
    assert drafted(kept, [50, 2, 3], "alice") in ([4, 5], [8])
    assert drafted(kept, [50, 2, 3], "bob") == []


def test_loading_keeps_the_newest_within_the_bounds(saved):
    kept = memory(max_outputs=2)
    kept.restore(storage.load(saved, ORIGIN))
    assert kept.outputs() == outputs()[1:]
    kept = memory(max_outputs=0)
    kept.restore(storage.load(saved, ORIGIN))
    assert kept.outputs() == []


def test_a_file_tells_no_namespace_and_only_its_owner_may_read_it(saved):
    assert b"alice" not in saved.read_bytes()
    assert stat.S_IMODE(os.stat(saved).st_mode) == 0o600
    assert os.listdir(saved.parent) == [saved.name]  # nothing half written is left


def test_no_outputs_are_a_file_as_well(tmp_path):
    path = tmp_path / "empty.npz"
    storage.save(path, [], ORIGIN)
    assert storage.load(path, ORIGIN) == []


def test_every_damage_is_told(saved):
    """A bit anywhere, or the end missing: refused, or without effect on what is read."""
    whole = saved.read_bytes()
    for place in range(0, len(whole), 7):
        damaged = bytearray(whole)
        damaged[place] ^= 0x10
        saved.write_bytes(damaged)
        try:
            assert storage.load(saved, ORIGIN) == outputs()  # a bit that nothing reads, such as a date
        except ConfigError as error:
            assert "suffix_decoding_cache_path" in str(error) and str(saved) in str(error)
    for size in range(0, len(whole), 11):
        saved.write_bytes(whole[:size])
        with pytest.raises(ConfigError, match=r"suffix_decoding_cache_path.*delete it, or give another path"):
            storage.load(saved, ORIGIN)


def arrays(**changes):
    header = b'{"format": "specdec-suffix", "version": 1, "vocab_size": 100, "shared": false}'
    return {
        "header": np.frombuffer(header, np.uint8),
        "tokens": np.array([1, 2, 3], np.int32),
        "lengths": np.array([2, 1]),
        "spaces": np.zeros(32, np.uint8),
    } | changes


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"header": np.frombuffer(b'{"format": "other"}', np.uint8)}, "no file that suffix decoding saved"),
        ({"header": np.frombuffer(b"[1]", np.uint8)}, "no file that suffix decoding saved"),
        ({"header": np.frombuffer(b'{"format": "specdec-suffix", "version": 9}', np.uint8)}, "version 9"),
        ({"lengths": np.array([2, 2])}, "do not fit together"),
        ({"lengths": np.array([4, -1])}, "do not fit together"),
        ({"tokens": np.array([1, 2, 100], np.int32)}, "do not fit together"),
        ({"tokens": np.array([1, -2, 3], np.int32)}, "do not fit together"),
        ({"tokens": np.array([1.0, 2.0, 3.0])}, "do not fit together"),
        ({"spaces": np.zeros(31, np.uint8)}, "do not fit together"),
        ({"tokens": np.array([{}, [], 0], object)}, "no file that suffix decoding saved"),
    ],
)
def test_arrays_that_nobody_saved_are_refused(tmp_path, changes, told):
    path = tmp_path / "made.npz"
    np.savez(path, **arrays(**changes))
    with pytest.raises(ConfigError, match=told):
        storage.load(path, ORIGIN)


def test_nothing_is_unpickled(tmp_path):
    class Armed:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "exploded"),)

    path = tmp_path / "armed.npz"
    path.write_bytes(pickle.dumps(Armed()))
    with pytest.raises(ConfigError, match="no file that suffix decoding saved"):
        storage.load(path, ORIGIN)
    assert not (tmp_path / "exploded").exists()


def test_outputs_of_another_vocabulary_or_of_shared_namespaces_are_refused(tmp_path):
    path = tmp_path / "other.npz"
    storage.save(path, outputs(), ORIGIN)
    with pytest.raises(ConfigError, match="vocabulary of 100, the target has 200"):
        storage.load(path, storage.Origin(200, False))
    assert storage.load(path, storage.Origin(100, True)) == outputs()  # the operator shares them
    storage.save(path, outputs(), storage.Origin(100, True))
    with pytest.raises(ConfigError, match="does not know whose text is whose"):
        storage.load(path, ORIGIN)


def test_a_file_that_cannot_be_written_leaves_the_old_one(saved, monkeypatch):
    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    before = saved.read_bytes()
    monkeypatch.setattr(np, "savez_compressed", fail)
    with pytest.raises(OSError, match="No space left"):
        storage.save(saved, outputs()[:1], ORIGIN)
    assert saved.read_bytes() == before and os.listdir(saved.parent) == [saved.name]
