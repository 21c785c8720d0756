"""Prompts, answers and states: what training is fed with."""

from __future__ import annotations

import json
import logging
from itertools import pairwise
from types import SimpleNamespace

import attrs
import numpy as np
import pytest
import torch
from specdec_train.answers import make_texts
from specdec_train.corpus import Corpus, StoredStates
from specdec_train.fresh import FreshStates
from specdec_train.options import DataOptions
from specdec_train.packing import pack
from specdec_train.prompts import read_prompts, write_user_turns
from specdec_train.states import make_states, state_file
from specdec_train.target import Target
from specdec_train.texts import Texts, TextStore
from specdecode.contract import FINAL, ConfigError, Tap
from specdecode.models import load_model, resolve_model
from specdecode.testing.reference import dense_forward
from specdecode.testing.tiny import EOS, table_checkpoint, tiny_checkpoint

VOCAB = 120  #: of the fixture's target
OPTIONS = DataOptions(
    data_tokens=200, answer_tokens=8, prompt_tokens=32, held_out=3, batch_size=4, temperatures="0,1"
)


def target_of(path):
    return Target.resolve(str(path), dtype="float32", device="cpu")


def equal(first, second):
    return all(np.array_equal(a, b) for a, b in zip(fields(first), fields(second), strict=True))


def fields(texts):
    return texts.ids, texts.answer, texts.starts, texts.greedy, texts.held_out


# -- prompts --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"prompt": "good"}\n{"prompt": 3}', r"line 2 must be"),
        ('{"prompt": "good"}\n{oops', r"line 2 is not JSON"),
        ('["a"]', r"line 1 must be"),
        ("\n", r"holds no prompt"),
    ],
)
def test_a_bad_file_of_prompts_is_told_with_its_line(tmp_path, text, words):
    file = tmp_path / "p.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_prompts(file)


def test_prompts_and_conversations_are_read(tmp_path):
    turns = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    file = tmp_path / "p.jsonl"
    file.write_text(json.dumps({"prompt": "one"}) + "\n\n" + json.dumps({"messages": turns}) + "\n")
    assert read_prompts(file) == [[{"role": "user", "content": "one"}], turns]


# -- answers --------------------------------------------------------------------------------------
def test_answers_are_the_targets_and_the_held_out_ones_greedy(target, prompts, tmp_path):
    made = target_of(target)
    texts = make_texts(made.engines(max_num_seqs=4), TextStore(tmp_path / "a"), [str(prompts)], OPTIONS)
    assert texts.answer_tokens >= OPTIONS.data_tokens
    assert texts.held_out.tolist() == [index < 3 for index in range(len(texts))]
    assert texts.greedy[:3].all() and not texts.greedy.all()
    with made.engine() as llm:
        from specdecode import SamplingParams

        prompt = texts.prompt(1)
        params = SamplingParams(temperature=0.0, max_tokens=8, detokenize=False)
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    assert texts.document(1).tolist() == [*prompt, *output.outputs[0].token_ids]
    again = make_texts(made.engines(max_num_seqs=2), TextStore(tmp_path / "b"), [str(prompts)], OPTIONS)
    assert equal(texts, again)
    trained = np.concatenate([texts.document(i)[-8:] for i in range(3, len(texts))])
    assert texts.counts(VOCAB).tolist() == np.bincount(trained, minlength=VOCAB).tolist()


def test_several_writers_write_the_shards_of_one(target, prompts, tmp_path):
    options = attrs.evolve(OPTIONS, batch_size=1, data_tokens=80)
    made, told = target_of(target), []
    alone = make_texts(made.writer(options), TextStore(tmp_path / "a"), [str(prompts)], options)
    two, store = attrs.evolve(options, writers=2), TextStore(tmp_path / "b")
    texts = make_texts(made.writer(two), store, [str(prompts)], two, advance=lambda *seen: told.append(seen))
    assert texts.answer_tokens >= options.data_tokens and told[-1][0] == texts.answer_tokens
    assert len(store.files()) > 1 and texts.held_out.tolist() == [i < 3 for i in range(len(texts))]
    shared = min(len(alone), len(texts), 8)
    assert all(alone.document(i).tolist() == texts.document(i).tolist() for i in range(shared))


def test_prompts_that_do_not_suffice_are_told(target, tmp_path, caplog):
    file = tmp_path / "few.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"say {i}"}) + "\n" for i in range(5)))
    with caplog.at_level(logging.WARNING):
        texts = make_texts(target_of(target).engines(), TextStore(tmp_path), [str(file)], OPTIONS)
    assert len(texts) == 5
    assert "used up after 40 answer tokens of the 200 of --data-tokens" in caplog.text


def test_prompts_that_the_context_has_no_room_for_are_left_out(target, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": "x" * length}) + "\n" for length in range(1, 81)))
    options = attrs.evolve(OPTIONS, data_tokens=2000, prompt_tokens=80)
    engines = target_of(target).engines(max_model_len=64)
    texts = make_texts(engines, TextStore(tmp_path / "texts"), [str(file)], options)
    prompts = [int((~texts.answer[begin:end]).sum()) for begin, end in pairwise(texts.starts)]
    assert max(prompts) == 63 and len(prompts) < 80


def test_a_target_that_ends_its_turns_writes_prompts_of_its_own(tmp_path):
    """Letters, and now and then an end."""
    logits = torch.full((300, 300), -20.0)
    logits[:, 100:126] = torch.randn(26, generator=torch.Generator().manual_seed(1))
    logits[:, EOS] = 1.0
    path = table_checkpoint(tmp_path / "talker", logits, max_position_embeddings=256)
    with target_of(path).engine() as llm:
        turns = write_user_turns(llm, 40, seed=3, max_tokens=64, batch_size=16)
        assert turns == write_user_turns(llm, 40, seed=3, max_tokens=64, batch_size=16)
        assert turns != write_user_turns(llm, 40, seed=1 << 30, max_tokens=64, batch_size=16)
    texts = [turn[0]["content"] for turn in turns]
    assert 3 <= len(set(texts)) == len(texts) < 40
    assert all(turn[0]["role"] == "user" and len(turn[0]["content"]) >= 8 for turn in turns)
    given = make_texts(target_of(path).engines(), TextStore(tmp_path / "t"), ["self"], OPTIONS)
    assert len(given) > 10


# -- states ---------------------------------------------------------------------------------------
def dense_states(model, texts, taps, boundaries):
    """``[N, H]`` at each boundary, of every document alone."""
    found = [dense_forward(model, texts.document(index).tolist(), taps)[1] for index in range(len(texts))]
    return {b: torch.cat([states[place] for states in found]) for place, b in enumerate(boundaries)}


def test_states_are_those_of_a_dense_forward(tmp_path):
    """Of layers that add something, for texts of unequal length, two of them equal."""
    path = tiny_checkpoint(tmp_path / "t", num_hidden_layers=4, max_position_embeddings=128)
    draw = np.random.default_rng(0)
    prompts = [draw.integers(3, 300, size).tolist() for size in (5, 1, 40, 17)]
    prompts.append(prompts[0])
    answers = [draw.integers(3, 300, size).tolist() for size in (7, 3, 20, 1)]
    answers.append(answers[0])
    texts = Texts.of(prompts, answers, [True] * 5, [False] * 5)
    store = TextStore(tmp_path / "store")
    store.save(0, texts)
    store.save(1, Texts.of(prompts[1:3], answers[1:3], [True] * 2, [False] * 2))
    boundaries = [1, 3, "final"]
    target = target_of(path)
    make_states(target.engines(), store, boundaries)
    texts = Texts.joined(store.load())
    stored = Corpus.of(
        texts, lambda ids: StoredStates(store.folder, 2, boundaries, target.device), target.device
    )
    model = load_model(
        resolve_model(path), dtype=torch.float32, device=torch.device("cpu"), max_model_len=128
    )
    taps = [FINAL if boundary == "final" else Tap(boundary) for boundary in boundaries]
    fresh = Corpus.of(texts, lambda ids: FreshStates(model, boundaries, ids), target.device)
    kept = Corpus.of(texts, lambda ids: FreshStates(model, boundaries, ids, keep=True), target.device)
    assert len(texts) == 7
    wanted = dense_states(model, texts, taps, boundaries)
    assert not torch.allclose(wanted[1], wanted[3])
    # Rows of 24 tokens: some documents are cut, of which the later parts see the earlier ones.
    rows = pack(texts, np.random.default_rng(1).permutation(7), 24, target.device, rows_multiple=4)
    seen = 0
    for first in range(0, len(rows), 4):
        batches = [corpus.batch(rows, slice(first, first + 4)) for corpus in (stored, fresh, kept)]
        there = batches[0].documents >= 0
        index = rows.index[first : first + 4]
        seen += int(there.sum())
        for boundary, states in wanted.items():
            for batch in batches:
                assert batch.features[boundary].shape == (4, 24, states.shape[1])
                torch.testing.assert_close(
                    batch.features[boundary][there], states[index[there]], atol=1e-5, rtol=1e-4
                )
    assert seen == len(texts.ids)
    # Kept ones are read in another order, whatever the model would say now.
    with torch.no_grad():
        model.norm.weight.zero_()
    rows = pack(texts, np.random.default_rng(2).permutation(7), 24, target.device, rows_multiple=4)
    for corpus, same in ((kept, True), (fresh, False)):
        batch = corpus.batch(rows, slice(0, 4))
        there = batch.documents >= 0
        expected = wanted["final"][rows.index[:4][there]]
        assert torch.allclose(batch.features["final"][there], expected, atol=1e-5, rtol=1e-4) == same
    file = state_file(store.folder, 1, 0)
    stamp = file.stat().st_mtime_ns
    make_states(target.engines(), store, boundaries)
    assert file.stat().st_mtime_ns == stamp  # what is there is not made again


def test_states_that_do_not_fit_on_the_disk_are_refused(tmp_path, monkeypatch):
    path = tiny_checkpoint(tmp_path / "t", num_hidden_layers=4)
    store = TextStore(tmp_path / "store")
    store.save(0, Texts.of([[5, 6]], [[7, 8]], [True], [False]))
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=1000))
    with pytest.raises(ConfigError, match=r"--work: .* GiB left: .*--fresh-states"):
        make_states(target_of(path).engines(), store, [1, "final"])
    assert not state_file(store.folder, 1, 0).exists()


# -- batches --------------------------------------------------------------------------------------
def test_rows_hold_every_token_once_and_documents_apart():
    sizes = [3, 30, 7, 1, 12, 16, 5]
    texts = Texts.of(
        [[10 + d] for d in range(7)],
        [[10 + d] * (s - 1) for d, s in enumerate(sizes)],
        [True] * 7,
        [False] * 7,
    )
    order = np.array([4, 1, 0, 6, 2, 5])
    rows = pack(texts, order, 16, torch.device("cpu"), rows_multiple=4)
    there = rows.documents >= 0
    assert len(rows) % 4 == 0
    wanted = [i for d in order for i in range(texts.starts[d], texts.starts[d + 1])]
    assert sorted(rows.index[there].tolist()) == sorted(wanted)
    ids = torch.from_numpy(texts.ids)[rows.index]
    for row in range(len(rows)):
        for piece in rows.documents[row].unique().tolist():
            if piece >= 0:
                mine = rows.documents[row] == piece
                assert len(ids[row][mine].unique()) == 1
                assert torch.equal(
                    rows.index[row][mine].diff(), torch.ones(int(mine.sum()) - 1, dtype=torch.int64)
                )
