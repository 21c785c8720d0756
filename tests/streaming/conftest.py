"""Tokenizers of every way to decode, and engines that are made to say given tokens in given steps.

All vocabularies have 300 ids or fewer, as many as the ``lab``'s target: 0 to 2 are special, 3 is an
added special token that is no named one, 4 an added token that is not special.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest

NAMED = ("<unk>", "<s>", "</s>")
SPECIAL, ADDED = "<|tool|>", "<note>"
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = ["▁", "▁a", "a", "b", "▁the", "s", "世", "é", "🙂", ".", "▁▁", "st", "op", "▁st", "\ufffd", ""]
#: Byte strings that begin and end inside characters.
MERGED = [b"\xe4\xb8", b"\x96a", b"a\xf0", b"\x9f\x99", b"\x82b", b" the", b"sto", b"\xff\xfe", "é".encode()]


def _bytes_on_characters(data: bytes) -> str:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return "".join(bytes_to_unicode()[byte] for byte in data)


def _of(words: Sequence[str], decoder: Any, **options: Any) -> Any:
    """A tokenizer whose ids are the named tokens, two added ones, then ``words``."""
    from tokenizers import AddedToken, Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocab = {word: place for place, word in enumerate([*NAMED, SPECIAL, ADDED, *words])}
    backend = Tokenizer(models.WordLevel(vocab=vocab, unk_token="<unk>"))
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in (*NAMED, SPECIAL)])
    backend.add_tokens([AddedToken(ADDED, special=False, normalized=False)])
    named = dict(zip(("unk_token", "bos_token", "eos_token"), NAMED, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=backend, **named, **options)


def _tokenizers() -> dict[str, Any]:
    from tokenizers import decoders

    space, fuse = decoders.Replace("▁", " "), decoders.Fuse()
    words = ["hello", "##s", "##ing", "a", "b", ".", "'", "##'", "do", "n't", "not", "é", "世"]
    return {
        "byte-level": _of(
            [_bytes_on_characters(bytes([byte])) for byte in range(256)]
            + [_bytes_on_characters(m) for m in MERGED[:-1]],
            decoders.ByteLevel(),
        ),
        "byte-fallback": _of(
            BYTE_TOKENS + PIECES,
            decoders.Sequence([space, decoders.ByteFallback(), fuse, decoders.Strip(" ", 1, 0)]),
        ),
        "byte-fallback-bare": _of(
            BYTE_TOKENS + PIECES, decoders.Sequence([space, decoders.ByteFallback(), fuse])
        ),
        "metaspace": _of(PIECES, decoders.Metaspace()),
        "word-piece": _of(
            words, decoders.WordPiece(prefix="##", cleanup=True), clean_up_tokenization_spaces=True
        ),
        "suffix": _of(["a", "b</w>", "the</w>", "st", "op</w>", ".</w>"], decoders.BPEDecoder("</w>")),
        "no-decoder": _of(["a", "b", "c", "."], None),
    }


@pytest.fixture(scope="session")
def tokenizers() -> dict[str, Any]:
    """Name -> tokenizer."""
    return _tokenizers()


def decode(tokenizer: Any, ids: Sequence[int], *, skip: bool = True, spaces: bool = True) -> str:
    """The tokenizer's own decode of all ``ids``; ``spaces`` as in ``SamplingParams``."""
    options = {"skip_special_tokens": skip, "clean_up_tokenization_spaces": False}
    ids = [token for token in ids if tokenizer.convert_ids_to_tokens(token) is not None]
    if skip or spaces:
        return tokenizer.decode(ids, **options)
    special = set(tokenizer.all_special_ids)
    groups: list[list[int]] = []
    for place, token in enumerate(ids):
        if place and not (token in special and ids[place - 1] in special):
            groups[-1].append(token)
        else:
            groups.append([token])
    return "".join(tokenizer.decode(group, **options) for group in groups)


def text_of(tokenizer: Any, prompt: Sequence[int], output: Sequence[int], **mode: bool) -> str:
    """What the output adds to the prompt's text."""
    before, after = decode(tokenizer, prompt, **mode), decode(tokenizer, [*prompt, *output], **mode)
    same = 0
    while same < min(len(before), len(after)) and before[same] == after[same]:
        same += 1
    return after[same:]


@pytest.fixture(scope="session")
def whole() -> Callable[..., str]:
    """:func:`text_of`, for test files, which cannot import this one."""
    return text_of


@attrs.define(eq=False)
class Forced:
    """An engine that says what it is told to, in steps of given sizes."""

    llm: Any
    tokenizer: Any
    script: Any  #: the proposer's

    def run(
        self, prompt: Sequence[int], output: Sequence[int], sizes: Sequence[int], **params: Any
    ) -> Streams:
        """``output`` behind ``prompt``; step ``i`` brings ``sizes[i % len(sizes)]`` tokens, at least one.

        The request is made three times, once for each kind of output.
        """
        from specdecode import RequestOutputKind, SamplingParams

        def force(output_ids: Sequence[int], logits: Any) -> Any:
            logits[:] = -float("inf")
            logits[output[min(len(output_ids), len(output) - 1)]] = 0.0
            return logits

        fields = {"temperature": 0.0, "ignore_eos": True, "max_tokens": len(output)} | params
        self.script.text, self.script.sizes = [*prompt, *output], list(sizes)
        engine = self.llm.llm_engine
        seen: dict[str, list[Any]] = {kind.name: [] for kind in RequestOutputKind}
        for kind in RequestOutputKind:
            wish = SamplingParams(**fields, logits_processors=[force], output_kind=kind)
            engine.add_request(kind.name, {"prompt_token_ids": list(prompt)}, wish)
        try:
            while engine.has_unfinished_requests():
                for got in engine.step():
                    seen[got.request_id].append(got.outputs[0])
        finally:
            engine.abort_request(list(seen))
        return Streams(seen["DELTA"], seen["CUMULATIVE"], seen["FINAL_ONLY"])


@attrs.frozen
class Streams:
    """The outputs of one request in its three kinds."""

    deltas: list[Any]
    cumulative: list[Any]
    final_only: list[Any]

    def agreed(self) -> Any:
        """The final output, after the three kinds are found to tell the same."""
        (final,) = self.final_only
        last = self.cumulative[-1]
        assert "".join(delta.text for delta in self.deltas) == last.text == final.text
        assert (
            [t for delta in self.deltas for t in delta.token_ids]
            == list(last.token_ids)
            == list(final.token_ids)
        )
        for one in (self.deltas[-1], last):
            assert (one.finish_reason, one.stop_reason) == (final.finish_reason, final.stop_reason)
        assert len(self.deltas) == len(self.cumulative)
        text = ""
        for delta, so_far in zip(self.deltas, self.cumulative, strict=True):
            text += delta.text
            assert so_far.text == text
        return final

    @property
    def sent(self) -> list[str]:
        """What had been sent after each step."""
        return [output.text for output in self.cumulative]

    @property
    def sizes(self) -> list[int]:
        """How many tokens each step brought."""
        return [len(delta.token_ids) for delta in self.deltas]


@pytest.fixture(scope="session")
def forced(lab: Any, tokenizers: Any, tmp_path_factory: Any) -> Iterator[Callable[[str], Forced]]:
    """Tokenizer name -> :class:`Forced`."""
    from specdecode import LLM

    root: Path = tmp_path_factory.mktemp("tokenizers")
    known: dict[str, Forced] = {}

    def engine(name: str) -> Forced:
        if name not in known:
            tokenizers[name].save_pretrained(root / name)
            llm = LLM(
                str(lab.target),
                tokenizer=str(root / name),
                dtype="float32",
                device=lab.device.type,
                max_model_len=128,
                num_gpu_blocks_override=64,
                speculative_config={"method": "streaming-steps", "num_speculative_tokens": 6},
            )
            proposer = llm.llm_engine.core.drafting.proposer.proposer
            known[name] = Forced(llm, tokenizers[name], proposer)
        return known[name]

    _install()
    yield engine
    for one in known.values():
        counted = {metric.name: metric.value for metric in one.llm.get_metrics()}
        assert counted["specdecode:proposer_failures"] == 0
        if counted["vllm:spec_decode_num_draft_tokens"] > 50:  # a worker may have run few of the tests
            assert counted["vllm:spec_decode_num_accepted_tokens"] > 0
        one.llm.llm_engine.core.scheduler.pool.check([])
        one.llm.shutdown()


def _install() -> None:
    """Register a method whose drafts are right and as long as its ``sizes`` say."""
    from specdecode.contract import API, LengthFields, Needs, Proposer, ProposerSpec, Tokens
    from specdecode.plugins import default_manager, hookimpl

    class Steps(Proposer):
        def __init__(self) -> None:
            self.text: list[int] = []
            self.sizes: list[int] = []
            self._turns: dict[str, int] = {}

        def on_add(self, request: Any) -> None:
            self._turns[request.id] = 0

        def on_finish(self, request_id: str, reason: str) -> None:
            del self._turns[request_id]

        def propose(self, step: Any, out: Any) -> None:
            for row, name in enumerate(step.request_ids):
                self._turns[name] += 1
                size = self.sizes[self._turns[name] % len(self.sizes)]
                done = len(step.history[row])
                drafts = self.text[done : done + min(size - 1, int(step.budget[row]), int(step.room[row]))]
                out.ids[row, : len(drafts)] = drafts
                out.lens[row] = len(drafts)

    def needs(config: Any, context: Any) -> Needs:
        length = config.num_speculative_tokens
        return Needs(width=length, depth=length, tokens=Tokens.HISTORY)

    class Plugin:
        @hookimpl
        def specdecode_proposers(self) -> Iterator[ProposerSpec]:
            yield ProposerSpec(
                name="streaming-steps",
                summary="right drafts of given lengths",
                api=API,
                config=LengthFields,
                needs=needs,
                build=lambda config, context: Steps(),
            )

    default_manager().register(Plugin(), name="streaming-steps")
