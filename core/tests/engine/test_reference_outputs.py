"""Texts, stops and log-probabilities of the reference decoder, against what its own tokens say."""

from __future__ import annotations

import math

import pytest
import torch
from specdecode import SamplingParams
from specdecode.models import load_model, resolve_model
from specdecode.testing.reference import ReferenceDecoder, dense_forward
from specdecode.testing.word_tokenizer import CHARACTERS, byte_ids, word_tokenizer

PROMPT = [40, 7, 91, 12, 5]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def decoder(tiny_target):
    cpu = torch.device("cpu")
    model = load_model(resolve_model(str(tiny_target)), dtype=torch.float32, device=cpu, max_model_len=64)
    return ReferenceDecoder(model, word_tokenizer(), eos_ids=[2])


def ask(decoder, prompt=PROMPT, **changes):
    (completion,) = decoder.request(prompt, GREEDY.clone(**changes)).outputs
    return completion


def forced(tokens):
    """A processor that draws these."""

    def force(output_ids, logits):
        logits[:] = -float("inf")
        logits[tokens[len(output_ids)]] = 0.0
        return logits

    return [force]


def test_text_of_words(decoder):
    got = ask(decoder, logits_processors=forced([5, 2, 2, 9]), max_tokens=4)
    assert got.text == " w5 w9"
    shown = {"skip_special_tokens": False, "logits_processors": forced([5, 2, 2, 9]), "max_tokens": 4}
    assert ask(decoder, **shown).text == " w5 <eos> <eos> w9"
    assert ask(decoder, **shown, spaces_between_special_tokens=False).text == " w5 <eos><eos> w9"
    assert ask(decoder, detokenize=False).text == ""


@pytest.mark.parametrize("character", CHARACTERS)
def test_text_of_characters(decoder, character):
    tokens = [5, *byte_ids(character, 300), 9]
    whole = ask(decoder, logits_processors=forced(tokens), max_tokens=len(tokens))
    assert whole.text == f" w5{character} w9"
    stopped = ask(decoder, logits_processors=forced(tokens), max_tokens=len(tokens), stop=[character])
    assert (stopped.text, len(stopped.token_ids)) == (" w5", len(tokens) - 1)


def stop_at(decoder, stop, tokens=(5, 7, 9, 7, 11), **changes):
    got = ask(
        decoder, **({"logits_processors": forced(tokens), "stop": stop, "max_tokens": len(tokens)} | changes)
    )
    return len(got.token_ids), got.text, got.finish_reason, got.stop_reason


def test_stop_strings(decoder):
    assert stop_at(decoder, "w7") == (2, " w5 ", "stop", "w7")
    assert stop_at(decoder, "w7", include_stop_str_in_output=True) == (2, " w5 w7", "stop", "w7")
    assert stop_at(decoder, "7 w9") == (3, " w5 w", "stop", "7 w9")
    assert stop_at(decoder, ["w9", "7 w9"]) == (3, " w5 w", "stop", "7 w9")  # the one that begins first
    assert stop_at(decoder, "w7", min_tokens=2) == (4, " w5 w7 w9 ", "stop", "w7")
    assert stop_at(decoder, "w12") == (5, " w5 w7 w9 w7 w11", "length", None)  # w12 is in the prompt
    assert stop_at(decoder, "w11") == (5, " w5 w7 w9 w7 ", "stop", "w11")  # at the length, too


def test_stop_tokens(decoder):
    wish = {"logits_processors": forced([5, 7, 2, 9, 9]), "max_tokens": 5, "ignore_eos": False}
    got = ask(decoder, **wish)
    assert (got.token_ids, got.text) == ([5, 7, 2], " w5 w7")
    assert (got.finish_reason, got.stop_reason) == ("stop", None)
    got = ask(decoder, **wish, stop_token_ids=[7])
    assert (got.token_ids, got.text, got.stop_reason) == ([5, 7], " w5", 7)
    assert ask(decoder, **wish, stop_token_ids=[7], include_stop_str_in_output=True).text == " w5 w7"
    assert ask(decoder, **wish | {"ignore_eos": True}).token_ids == [5, 7, 2, 9, 9]


def test_logprobs_are_the_models(decoder):
    got = ask(decoder, logprobs=2, logit_bias={17: 100.0})
    assert got.token_ids == [17] * 8  # the bias is not in the numbers
    hidden, _ = dense_forward(decoder._model, [*PROMPT, *got.token_ids])
    rows = decoder._model.compute_logits(hidden[len(PROMPT) - 1 : -1]).log_softmax(-1)
    for entries, row in zip(got.logprobs, rows, strict=True):
        assert next(iter(entries)) == 17
        assert [*entries][1:] == row.topk(2).indices.tolist()
        assert entries[17].rank == 1 + int((row > row[17]).sum())
        for token, entry in entries.items():
            assert entry.logprob == pytest.approx(float(row[token]), abs=1e-5)
            assert entry.decoded_token == f"w{token}" or token < 3 or token >= 290
    assert got.cumulative_logprob == pytest.approx(math.fsum(rows[:, 17].tolist()), abs=1e-4)


def test_prompt_logprobs_are_the_models(decoder):
    got = decoder.request(PROMPT, GREEDY.clone(prompt_logprobs=-1, max_tokens=1)).prompt_logprobs
    hidden, _ = dense_forward(decoder._model, PROMPT)
    rows = decoder._model.compute_logits(hidden).log_softmax(-1)
    assert got[0] is None and len(got) == len(PROMPT)
    for entries, row, token in zip(got[1:], rows, PROMPT[1:], strict=False):
        assert next(iter(entries)) == token and len(entries) == 300
        assert sorted(entry.rank for entry in entries.values()) == list(range(1, 301))
        assert entries[token].logprob == pytest.approx(float(row[token]), abs=1e-5)


def test_a_prompt_of_one_token_has_no_logprobs(decoder):
    assert decoder.request([5], GREEDY.clone(prompt_logprobs=2)).prompt_logprobs == [None]


def test_prompts_are_cut(decoder):
    assert decoder.request(PROMPT, GREEDY.clone(truncate_prompt_tokens=2)).prompt_token_ids == PROMPT[-2:]
    long = list(range(10, 90))
    cut = decoder.request(long, GREEDY.clone(truncate_prompt_tokens=-1))
    assert cut.prompt_token_ids == long[-63:]
    assert (len(cut.outputs[0].token_ids), cut.outputs[0].finish_reason) == (1, "length")


def test_errors_keep_what_came_before(decoder):
    def raises(output_ids, logits):
        if len(output_ids) == 3:
            raise RuntimeError("three is enough")
        return logits

    got, want = ask(decoder, logits_processors=[raises], logprobs=0), ask(decoder)
    assert got.token_ids == want.token_ids[:3] and want.text.startswith(got.text)
    assert (got.finish_reason, got.error) == ("error", "RuntimeError: three is enough")
    assert len(got.logprobs) == 3


def test_what_no_reference_can_say(decoder):
    with pytest.raises(ValueError, match="seed"):
        decoder.request(PROMPT, SamplingParams())
    with pytest.raises(ValueError, match="grammar"):
        decoder.request(PROMPT, GREEDY, grammar=lambda output: [1])
