"""Answers like those of the past are drafted better than from their own text."""

import json
import random

import pytest
from specdecode.plugins import default_manager, prepare
from specdecode.testing.conformance import toy
from specdecode.testing.dry import DryEngine, Recorded, recorded_target

VOCABULARY = 4000


def letters(count, seed):
    """Answers of one service: a greeting, some of its stock sentences, each with two words of its own."""
    stock, chosen = random.Random(0), random.Random(seed)
    sentences = [[stock.randrange(VOCABULARY) for _ in range(stock.randint(6, 14))] for _ in range(20)]
    for _ in range(count):
        answer = list(sentences[0])
        for sentence in sorted(chosen.sample(range(1, 20), 6)):
            answer += [*sentences[sentence], chosen.randrange(VOCABULARY), chosen.randrange(VOCABULARY)]
        prompt = [chosen.randrange(VOCABULARY) for _ in range(12)]
        yield Recorded(prompt=prompt, answer=answer)


@pytest.fixture(scope="module")
def past(tmp_path_factory):
    file = tmp_path_factory.mktemp("past") / "answers.jsonl"
    file.write_text("".join(json.dumps({"token_ids": text.answer}) + "\n" for text in letters(40, seed=1)))
    return str(file)


def replay(method, **keys):
    config = {"method": method, "num_speculative_tokens": 6, **keys}
    prepared = prepare(default_manager(), config, recorded_target(VOCABULARY))
    engine = DryEngine(prepared.build(4), prepared.needs, vocab_size=VOCABULARY, max_num_seqs=4)
    return engine.replay(letters(20, seed=2))


def test_text_is_cut_by_the_tokenizer_that_the_replay_is_given(tmp_path):
    file = tmp_path / "answers.jsonl"
    file.write_text('{"answer": "one two three"}')
    tokenizer = toy().info.tokenizer
    ids = tokenizer.load()("one two three").input_ids
    config = {"method": "retrieval", "datastore": str(file), "num_speculative_tokens": 6}
    prepared = prepare(default_manager(), config, recorded_target(300, tokenizer))
    engine = DryEngine(prepared.build(1), prepared.needs, vocab_size=300)
    assert engine.replay([Recorded(prompt=ids[:3], answer=ids[3:])]).accepted > 5


@pytest.mark.parametrize("tree", [False, True])
def test_more_is_accepted_than_prompt_lookup_finds(past, tree):
    pytest.importorskip("specdec_ngram")
    retrieval, ngram = replay("retrieval", datastore=past, retrieval_tree=tree), replay("ngram")
    assert ngram.tokens_per_step < 1.1  # no text repeats itself here
    assert retrieval.tokens_per_step > 2
    assert retrieval.acceptance_rate > 0.6


def test_a_tree_finds_more_than_a_chain_where_answers_part(past):
    keys = {
        "datastore": past,
        "retrieval_match_min": 1,
        "retrieval_min_score": 0.0,
        "num_speculative_tokens": 12,
    }
    chain, tree = replay("retrieval", **keys), replay("retrieval", **keys, retrieval_tree=True)
    assert tree.accepted_at[0] > chain.accepted_at[0]
