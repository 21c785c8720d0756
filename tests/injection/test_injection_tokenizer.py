"""A tokenizer that raises: encoding refuses the call, decoding ends the request it concerns."""

from __future__ import annotations

import pytest
from specdecode.contract import ConfigError

ORDERS = pytest.mark.parametrize("order", ["plain", "late"])


class Moody:
    """A tokenizer whose methods raise where the test says so."""

    def __init__(self, inner):
        self.inner = inner
        self.bad_text = None
        self.bad_token = None
        self.calls = 0

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def __call__(self, text, *args, **keywords):
        self.check(text)
        return self.inner(text, *args, **keywords)

    def encode(self, text, *args, **keywords):
        self.check(text)
        return self.inner.encode(text, *args, **keywords)

    def check(self, text):
        if self.bad_text is not None and self.bad_text in text:
            raise OverflowError("int too big to convert")

    def decode(self, ids, **keywords):
        self.calls += 1
        if self.bad_token in list(ids):
            raise KeyError(self.bad_token)
        return self.inner.decode(ids, **keywords)


@pytest.fixture
def start(lab, monkeypatch):
    """A rig with a moody tokenizer."""
    from specdecode.tokenizer_files import TokenizerFiles

    load = TokenizerFiles.load
    monkeypatch.setattr(TokenizerFiles, "load", lambda files: Moody(load(files)))

    def start(method, order="plain", asks=()):
        return lab.rig(method, asks, order, skip_tokenizer_init=False)

    return start


@pytest.mark.parametrize(
    ("prompt", "changes", "what"),
    [("a bad one", {}, r"prompts\[1\]"), ("fine", {"bad_words": ["bad"]}, "bad_words 'bad'")],
)
def test_encoding(lab, start, prompt, changes, what):
    """One error that names the prompt, before anything is queued."""
    asks = lab.mixed(3)
    with start("ngram") as rig:
        rig.llm.get_tokenizer().bad_text = "bad"
        params = [asks[0].params, asks[0].params.clone(**changes)]
        with pytest.raises(ConfigError, match=rf"{what} cannot be tokenized.*OverflowError: int too big"):
            rig.llm.generate(["good", prompt], params, use_tqdm=False)
        assert not rig.llm.llm_engine.has_unfinished_requests()
        rig.generate(asks)


@ORDERS
@pytest.mark.parametrize("method", ["none", "self-draft", "oracle-tree"])
@pytest.mark.parametrize("place", [0, 4])
def test_decoding(lab, start, method, order, place):
    asks = [lab.ask(lab.prompt(index), temperature=0, max_tokens=12, logprobs=0) for index in range(4)]
    token = lab.expected(asks[1])[place]
    with start(method, order, asks) as rig:
        tokenizer = rig.llm.get_tokenizer()
        tokenizer.bad_token = token
        prompts = [{"prompt_token_ids": ask.prompt} for ask in asks]
        outputs = rig.llm.generate(prompts, [ask.params for ask in asks], use_tqdm=False)
        for ask, output in zip(asks, outputs, strict=True):
            (completion,) = output.outputs
            want = lab.expected(ask)
            context = ask.prompt[-5:]
            if token not in want and token not in context:
                rig.compare(ask, output)
                assert completion.text == tokenizer.inner.decode(want, skip_special_tokens=True)
                continue
            kept = 1 if token in context else want.index(token) + 1
            assert completion.finish_reason == "error"
            assert (
                f"turning token {want[kept - 1]} of the output into text raised KeyError" in completion.error
            )
            assert list(completion.token_ids) == want[:kept]
            assert len(completion.logprobs) == len(completion.token_sources) == kept
            assert completion.text == tokenizer.inner.decode(want[: kept - 1], skip_special_tokens=True)
        tokenizer.bad_token = None
        rig.generate(asks)


@ORDERS
def test_a_request_whose_context_cannot_be_decoded(lab, start, order):
    """It is refused as it is queued, all of its completions, and its name is free again."""
    (ask, other) = (lab.ask(lab.prompt(index), temperature=0, max_tokens=12, n=2) for index in (1, 2))
    with start("self-draft", order, [ask, other]) as rig:
        rig.add("b", other)
        rig.step()
        tokenizer = rig.llm.get_tokenizer()

        def broken(ids, **keywords):
            raise ValueError("no text")

        tokenizer.convert_ids_to_tokens = broken
        with pytest.raises(ValueError, match="no text"):
            rig.add("a", ask)
        del tokenizer.convert_ids_to_tokens
        assert rig.llm.llm_engine.get_num_unfinished_requests() == 1
        rig.add("a", ask)
        finished = rig.drain()
        rig.compare(ask, finished["a"])
        rig.compare(other, finished["b"])


def test_a_token_that_has_no_text_is_told_as_a_number(lab, start, caplog):
    """Among the likeliest tokens there may be ids of the padded vocabulary, which some tokenizers refuse."""
    ask = lab.ask(lab.prompt(1), temperature=0, max_tokens=6, logprobs=3, prompt_logprobs=1)
    with start("self-draft", asks=[ask]) as rig:
        (plain,) = rig.generate([ask])
        drawn = {*ask.prompt, *plain.outputs[0].token_ids}
        rows = plain.outputs[0].logprobs
        token = next(token for row in rows for token in row if token not in drawn)
        rig.llm.get_tokenizer().bad_token = token
        (output,) = rig.generate([ask])
        for row, before in zip(output.outputs[0].logprobs, rows, strict=True):
            assert row.keys() == before.keys()
            for name, entry in row.items():
                assert entry.decoded_token == (None if name == token else before[name].decoded_token)
        assert sum("has no text" in record.getMessage() for record in caplog.records) == 1
