"""Every field of SamplingParams, with speculation on: what comes out is what comes out without.

Each case says what its field is compared with, and must show an effect; a field without a case
fails. Ids, texts, logprobs, reasons and errors are compared, alone and in one mixed batch, computed
whole, in chunks and with preemptions.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import pytest

MAX_MODEL_LEN = 128
PLAIN = "none"
METHODS = ("ngram", "scripted-oracle", "scripted-oracle-tree", "scripted-self-draft")

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 20, "ignore_eos": True}
SEEDED = GREEDY | {"temperature": 0.5, "seed": 7}


@attrs.frozen
class Case:
    """Parameters that show what ``field`` does: with ``value`` the result is another than without."""

    field: str
    value: Any
    base: Mapping[str, Any]


def seven_first(output_ids: Any, logits: Any) -> Any:
    """Draws 7 as every third token."""
    if len(output_ids) % 3 == 1:
        logits[:] = -1e9
        logits[7] = 0.0
    return logits


def not_twice(prompt_ids: list[int], output_ids: list[int], logits: Any) -> Any:
    """No token that is in prompt or output already."""
    logits[[*prompt_ids, *output_ids]] = -100.0
    return logits


def raises_at_five(output_ids: list[int], logits: Any) -> Any:
    if len(output_ids) == 5:
        raise RuntimeError("five is enough")
    return logits


def cases_from(base: Mapping[str, Any], ids: Sequence[int]) -> Iterator[Case]:
    """Cases of the fields that matter whether a request is greedy or not; ``base`` alone gives ``ids``."""
    third, sixth = ids[2], ids[5]
    specials = {0: 9.0, 1: 9.0, 2: 9.0}
    often = {"logit_bias": {11: 4.0}}  # so that something repeats
    entries: list[tuple[str, Any, dict[str, Any]]] = [
        ("n", 3, {}),
        ("presence_penalty", 1.7, often),
        ("frequency_penalty", 0.9, often),
        ("repetition_penalty", 1.5, often),
        ("stop", f"w{sixth}", {}),
        ("stop_token_ids", [sixth, 7], {"logit_bias": {7: 4.0}}),
        ("include_stop_str_in_output", True, {"stop": [f"w{third} "]}),
        ("ignore_eos", False, {"logit_bias": {2: 7.0}}),
        ("max_tokens", 5, {}),
        ("min_tokens", 9, {"ignore_eos": False, "logit_bias": {2: 7.0}}),
        ("logprobs", 4, {}),
        ("prompt_logprobs", 3, {}),
        ("detokenize", False, {}),
        ("skip_special_tokens", False, {"logit_bias": specials}),
        ("spaces_between_special_tokens", False, {"skip_special_tokens": False, "logit_bias": specials}),
        ("logit_bias", {third: -100.0, 11: 3.0}, {}),
        ("allowed_token_ids", [5, third, sixth, 40], {}),
        ("bad_words", [f"w{ids[1]} w{third}", f"w{sixth}"], {}),
        ("logits_processors", [seven_first], {}),
        ("logits_processors", [not_twice, seven_first], {}),
        ("logits_processors", [raises_at_five], {}),
        ("truncate_prompt_tokens", 6, {}),
        ("speculation", 2, {}),
        ("speculation", False, {}),
        ("best_of", 2, {"n": 2}),
    ]
    return (Case(field, value, {**base, **beside}) for field, value, beside in entries)


#: Cases of the fields that matter only where there is chance.
SAMPLED = (
    Case("temperature", 1.6, SEEDED),
    Case("temperature", 0.0, SEEDED),
    Case("top_p", 0.3, SEEDED),
    Case("top_k", 2, SEEDED),
    Case("min_p", 0.5, SEEDED),
    Case("seed", 2**40, SEEDED),
)


#: Fields that a result does not show, and the test that does.
SHOWN_ELSEWHERE = {
    "speculation": "test_speculation_bounds_the_drafts",
    "best_of": "test_best_of_is_n",
    "output_kind": "test_output_kind",
    "structured_outputs": "test_refused",
    "guided_decoding": "test_refused",
}


# -- running --------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def words(lab: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tokenizer whose token ``i`` reads ``wi``, with a space between any two; 0 to 2 are special."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<bos>", "<eos>"]
    vocab = {name: index for index, name in enumerate([*special, *(f"w{i}" for i in range(3, 300))])}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in special])
    path = tmp_path_factory.mktemp("words")
    shutil.copy(lab.target / "config.json", path)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    ).save_pretrained(path)
    return str(path)


class Bench:
    """Engines with and without speculation over one target and tokenizer."""

    def __init__(self, lab: Any, words: str) -> None:
        self._lab = lab
        self._words = words
        self._rigs: dict[Any, Any] = {}
        self.prompt = {"prompt": " ".join(f"w{token}" for token in lab.prompt(1))}
        self._texts: list[list[int]] | None = None
        self._alone: dict[Any, Any] = {}
        self.cases = [
            *itertools.chain.from_iterable(
                cases_from(base, self.alone(base).outputs[0].token_ids) for base in (GREEDY, SEEDED)
            ),
            *SAMPLED,
        ]

    def run(self, method: str, wishes: list[Mapping[str, Any]], **engine: Any) -> list[Any]:
        """One call of ``generate``."""
        from specdecode import SamplingParams

        params = [SamplingParams(**wish) for wish in wishes]
        return self.rig(method, **engine).llm.generate([self.prompt] * len(params), params, use_tqdm=False)

    def alone(self, wish: Mapping[str, Any]) -> Any:
        """The result of one request without speculation or company."""
        key = repr(sorted(wish.items(), key=str))
        if key not in self._alone:
            (self._alone[key],) = self.run(PLAIN, [wish])
        return self._alone[key]

    def rig(self, method: str, **engine: Any) -> Any:
        key = (method, *sorted(engine.items()))
        if key not in self._rigs:
            config = {"method": method, "num_speculative_tokens": 5}
            config |= {
                "ngram": {"prompt_lookup_min": 1, "prompt_lookup_max": 3},
                "scripted-oracle": {"wrong_at": [3]},
            }.get(method, {})
            if "oracle" in method:
                config["texts"] = self.texts()
            self._rigs[key] = self._lab.rig(
                None if method == PLAIN else config,
                recorded=False,
                skip_tokenizer_init=False,
                tokenizer=self._words,
                **engine,
            )
        return self._rigs[key]

    def texts(self) -> list[list[int]]:
        """What the oracles know: the outputs of all cases, going on behind their stops."""
        if self._texts is None:
            on = {"stop": (), "stop_token_ids": (), "ignore_eos": True, "max_tokens": 30}
            outputs = self.run(PLAIN, [{**case.base, case.field: case.value, **on} for case in self.cases])
            self._texts = [
                [*output.prompt_token_ids, *completion.token_ids]
                for output in outputs
                for completion in output.outputs
            ]
        return self._texts

    def close(self) -> None:
        for rig in self._rigs.values():
            try:
                rig.check()
            finally:
                rig.llm.shutdown()


@pytest.fixture(scope="module")
def bench(lab: Any, words: str) -> Iterator[Bench]:
    bench = Bench(lab, words)
    yield bench
    bench.close()


# -- comparing ------------------------------------------------------------------------------------
def shown(output: Any) -> dict[str, Any]:
    """All of a result that must not depend on speculation; numbers of log-probabilities apart."""
    return {
        "prompt": output.prompt_token_ids,
        "prompt_logprobs": [row and list(row) for row in output.prompt_logprobs or ()],
        "outputs": [
            {
                "index": completion.index,
                "ids": list(completion.token_ids),
                "text": completion.text,
                "finish": (completion.finish_reason, completion.stop_reason, completion.error),
                "logprobs": completion.logprobs and [list(row) for row in completion.logprobs],
            }
            for completion in output.outputs
        ],
    }


def numbers(output: Any) -> list[float]:
    """The log-probabilities."""
    rows = [row for row in output.prompt_logprobs or () if row]
    for completion in output.outputs:
        rows += completion.logprobs or ()
    return [entry.logprob for row in rows for entry in row.values()]


def same(got: Any, want: Any) -> None:
    assert shown(got) == shown(want)
    assert numbers(got) == pytest.approx(numbers(want), abs=1e-4)
    for ours, theirs in zip(got.outputs, want.outputs, strict=True):
        assert (ours.cumulative_logprob is None) == (theirs.cumulative_logprob is None)


def wishes(bench: Bench) -> list[dict[str, Any]]:
    return [{**case.base, case.field: case.value} for case in bench.cases]


# -- tests ----------------------------------------------------------------------------------------
def test_every_field_has_a_case(bench):
    from specdecode import SamplingParams

    fields = {field.name for field in attrs.fields(SamplingParams) if field.init}
    assert fields == {case.field for case in bench.cases} | set(SHOWN_ELSEWHERE)
    assert all(test in globals() for test in SHOWN_ELSEWHERE.values())


def test_every_field_has_an_effect(bench):
    without = [
        f"{case.field}={case.value!r} under {dict(case.base)}"
        for case in bench.cases
        if case.field not in SHOWN_ELSEWHERE
        and shown(bench.alone({**case.base, case.field: case.value})) == shown(bench.alone(case.base))
    ]
    assert not without


@pytest.mark.parametrize("method", METHODS)
def test_alone(bench, method):
    accepted = 0
    for wish in wishes(bench):
        (got,) = bench.run(method, [wish])
        same(got, bench.alone(wish))
        accepted += got.metrics.accepted
    assert accepted > 50


#: Ways to run a batch: arguments of the engine.
ENGINES: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunked": {"max_num_batched_tokens": 16},
    "preempted": {"num_gpu_blocks_override": 24, "max_model_len": 64},
    "late": {"order": "late"},
}


@pytest.mark.parametrize("method", [PLAIN, *METHODS])
@pytest.mark.parametrize("engine", ENGINES)
def test_in_a_mixed_batch(bench, method, engine):
    for got, wish in zip(bench.run(method, wishes(bench), **ENGINES[engine]), wishes(bench), strict=True):
        same(got, bench.alone(wish))
    rig = bench.rig(method, **ENGINES[engine])
    assert (rig.metric("vllm:spec_decode_num_accepted_tokens") > 50) == (method != PLAIN)
    assert (rig.metric("vllm:num_preemptions") > 0) == (engine == "preempted")


@pytest.mark.parametrize("method", METHODS)
def test_speculation_bounds_the_drafts(bench, method):
    wide, two, off = bench.run(method, [GREEDY | {"speculation": wish} for wish in (None, 2, False)])
    assert wide.metrics.drafted > 0 and off.metrics.drafted == 0
    assert 0 < two.metrics.drafted <= 2 * two.metrics.draft_steps


def test_best_of_is_n(bench):
    from specdecode import SamplingParams
    from specdecode.contract import ConfigError

    with pytest.raises(ConfigError, match="best_of"):
        SamplingParams(n=2, best_of=3)
    two = bench.alone(SEEDED | {"n": 2, "best_of": 2})
    same(two, bench.alone(SEEDED | {"n": 2}))


@pytest.mark.parametrize("method", [PLAIN, *METHODS])
@pytest.mark.parametrize("changes", [{}, {"stop": "w"}, {"logprobs": 2, "prompt_logprobs": 1}, {"n": 2}])
def test_output_kind(bench, method, changes):
    """The three kinds tell the same, in pieces, growing, or at the end."""
    from specdecode import RequestOutputKind, SamplingParams

    engine = bench.rig(method).llm.llm_engine
    wish = SEEDED | changes
    if "stop" in changes:
        wish["stop"] = f"w{bench.alone(SEEDED).outputs[0].token_ids[9]}"
    want = bench.alone(wish)
    seen: dict[str, list[Any]] = {kind.name: [] for kind in RequestOutputKind}
    for kind in RequestOutputKind:
        engine.add_request(kind.name, bench.prompt, SamplingParams(**wish, output_kind=kind))
    while engine.has_unfinished_requests():
        for output in engine.step():
            seen[output.request_id].append(output)
    assert len(seen["FINAL_ONLY"]) == 1 and seen["FINAL_ONLY"][0].finished
    assert len(seen["CUMULATIVE"]) == len(seen["DELTA"]) > 1
    for outputs in seen.values():
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    same(seen["FINAL_ONLY"][0], want)
    same(seen["CUMULATIVE"][-1], want)
    for place, completion in enumerate(want.outputs):
        pieces = [output.outputs[place] for output in seen["DELTA"]]
        assert "".join(piece.text for piece in pieces) == completion.text
        assert [token for piece in pieces for token in piece.token_ids] == list(completion.token_ids)
        assert sum(len(piece.logprobs or ()) for piece in pieces) == len(completion.logprobs or ())
        assert (pieces[-1].finish_reason, pieces[-1].stop_reason) == (
            completion.finish_reason,
            completion.stop_reason,
        )
        text = ""
        for output in seen["CUMULATIVE"]:
            assert output.outputs[place].text.startswith(text)
            text = output.outputs[place].text
    told = [output.prompt_logprobs for output in seen["DELTA"] if output.prompt_logprobs is not None]
    assert len(told) == (1 if "prompt_logprobs" in changes else 0)


@pytest.mark.parametrize("field", ["structured_outputs", "guided_decoding"])
def test_refused(field):
    from specdecode import SamplingParams
    from specdecode.contract import ConfigError

    with pytest.raises(ConfigError, match=f"{field} is not built yet"):
        SamplingParams(**{field: {"choice": ["a"]}})
