"""SamplingParams: defaults, checks, what is refused."""

import copy
import math
import pickle
import subprocess
import sys

import pytest
from specdecode.api.params import RequestOutputKind, SamplingParams
from specdecode.contract import ConfigError


def test_defaults_are_vllms():
    params = SamplingParams()
    want = {
        "n": 1, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0,
        "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": None, "max_tokens": 16,
        "min_tokens": 0, "logprobs": None, "prompt_logprobs": None, "ignore_eos": False,
        "include_stop_str_in_output": False, "detokenize": True, "skip_special_tokens": True,
        "spaces_between_special_tokens": True, "logits_processors": None, "bad_words": None,
        "logit_bias": None, "allowed_token_ids": None, "truncate_prompt_tokens": None,
        "output_kind": RequestOutputKind.CUMULATIVE, "speculation": None, "structured_outputs": None,
    }  # fmt: skip
    assert {name: getattr(params, name) for name in want} == want
    assert not params.stop and not params.stop_token_ids


BAD = [
    ("temperature", math.nan), ("temperature", math.inf), ("temperature", -0.1), ("temperature", "1"),
    ("temperature", True), ("temperature", None),
    ("top_p", 0), ("top_p", 1.01), ("top_p", math.nan), ("top_p", -1),
    ("top_k", -2), ("top_k", 2.5), ("top_k", True), ("top_k", math.nan),
    ("min_p", -0.1), ("min_p", 1.1), ("min_p", math.nan),
    ("presence_penalty", 2.1), ("presence_penalty", math.nan),
    ("frequency_penalty", -2.1), ("frequency_penalty", math.inf),
    ("repetition_penalty", 0), ("repetition_penalty", -1), ("repetition_penalty", math.nan),
    ("n", 0), ("n", 10**9), ("n", 1.0), ("seed", 1.5), ("seed", "7"), ("seed", True),
    ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 3.0), ("min_tokens", -1), ("min_tokens", None),
    ("logprobs", -2), ("logprobs", True), ("speculation", -1), ("speculation", 2.5), ("speculation", "off"),
    ("stop", ""), ("stop", ["a", ""]), ("stop", [1]), ("stop", 5),
    ("stop_token_ids", [-1]), ("stop_token_ids", ["a"]), ("stop_token_ids", 3), ("stop_token_ids", [True]),
    ("allowed_token_ids", []), ("allowed_token_ids", [-5]), ("allowed_token_ids", "abc"),
    ("logit_bias", {-1: 1}), ("logit_bias", {"3": 1}), ("logit_bias", {3: 101}),
    ("logit_bias", {3: math.nan}), ("logit_bias", [3]), ("output_kind", "delta"), ("detokenize", 1),
    ("skip_special_tokens", None), ("spaces_between_special_tokens", "no"), ("ignore_eos", 0),
    ("include_stop_str_in_output", "yes"),
    ("best_of", 4), ("prompt_logprobs", -2), ("prompt_logprobs", True), ("logits_processors", print),
    ("logits_processors", [3]), ("bad_words", ["x", "  "]), ("bad_words", "abc"), ("bad_words", [5]),
    ("truncate_prompt_tokens", 0), ("truncate_prompt_tokens", -2), ("truncate_prompt_tokens", 1.5),
    ("structured_outputs", {"jsn": "{}"}), ("structured_outputs", 5), ("guided_decoding", object()),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), BAD)
def test_a_bad_value_is_refused_by_name(field, value):
    with pytest.raises(ConfigError, match=field) as caught:
        SamplingParams(**{field: value})
    assert isinstance(caught.value, ValueError)
    assert len(caught.value.faults) == 1
    shown = value if not isinstance(value, list | dict) else next(iter(value), "")
    assert str(shown) in str(caught.value)


def test_a_range_is_named():
    with pytest.raises(ConfigError, match=r"top_p must be a number above 0 and at most 1, got 0"):
        SamplingParams(top_p=0)
    with pytest.raises(ConfigError, match=r"n must be an integer between 1 and 16384, got 0"):
        SamplingParams(n=0)


def test_all_faults_are_told_at_once():
    with pytest.raises(ConfigError) as caught:
        SamplingParams(temperature=-1, top_p=7, n=0, bad_words=[""], stop=[""])
    assert len(caught.value.faults) == 5


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens must be at most max_tokens=4, got 5"),
        ({"stop": "x", "detokenize": False}, "stop needs the text"),
    ],
)
def test_bad_combinations(fields, message):
    with pytest.raises(ConfigError, match=message):
        SamplingParams(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": -1}, {"seed": -5}, {"seed": 2**80}, {"max_tokens": None, "min_tokens": 99},
        {"logprobs": -1}, {"logprobs": 0}, {"bad_words": []}, {"logits_processors": []},
        {"n": 3, "best_of": 3}, {"n": 3, "temperature": 0}, {"temperature": 0},
        {"stop": None, "stop_token_ids": None},
        {"logit_bias": {}}, {"min_tokens": 4, "max_tokens": 4},
    ],
)  # fmt: skip
def test_good_values(fields):
    SamplingParams(**fields)


def test_numpy_numbers_are_numbers():
    np = pytest.importorskip("numpy")
    assert SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3)).top_k == 3


def test_forms_that_mean_the_same():
    assert SamplingParams(stop="a").stop == SamplingParams(stop=["a"]).stop == ("a",)
    assert SamplingParams(speculation=True).speculation is None
    assert SamplingParams(speculation=False) == SamplingParams(speculation=0)
    assert SamplingParams(stop_token_ids=[3, 4]).stop_token_ids == (3, 4)


def test_greedy_begins_below_a_temperature():
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams(temperature=9e-6).greedy
    assert not SamplingParams(temperature=1e-5).greedy


def test_cloned_and_pickled():
    params = SamplingParams(temperature=0.5, stop="x", logit_bias={3: 1.0}, seed=4)
    assert params.clone() == params == copy.deepcopy(params) == pickle.loads(pickle.dumps(params))
    changed = params.clone(seed=5)
    assert (changed.seed, changed.temperature, params.seed) == (5, 0.5, 4)
    with pytest.raises(ConfigError, match="top_p"):
        params.clone(top_p=2)


def test_assignments_are_checked_and_converted():
    params = SamplingParams(min_tokens=3)
    params.max_tokens = 5
    params.stop = "x"
    params.speculation = False
    assert (params.max_tokens, params.stop, params.speculation) == (5, ("x",), 0)
    before = params.clone()
    for name, value in [("temperature", -1), ("max_tokens", 2), ("detokenize", False), ("bad_words", "x")]:
        with pytest.raises(ConfigError, match=name if name != "max_tokens" else "min_tokens"):
            setattr(params, name, value)
    assert params == before
    with pytest.raises(AttributeError):
        params.temprature = 1.0
    with pytest.raises(TypeError):
        hash(params)  # what can change is no key


def test_the_callers_containers_are_not_shared():
    bias, stop = {3: 1.0}, ["a"]
    params = SamplingParams(logit_bias=bias, stop=stop)
    bias[4] = 1.0
    stop.append("b")
    assert params.logit_bias == {3: 1.0} and params.stop == ("a",)


def test_check_vocab():
    params = SamplingParams(
        stop_token_ids=[5, 300], logit_bias={299: 1, 2**40: 1}, allowed_token_ids=[1, 301]
    )
    with pytest.raises(ConfigError) as caught:
        params.check_vocab(300)
    assert [fault.split()[0] for fault in caught.value.faults] == [
        "stop_token_ids",
        "logit_bias",
        "allowed_token_ids",
    ]
    assert "between 0 and 299, got 300" in caught.value.faults[0]
    params.check_vocab(2**41)
    with pytest.raises(ConfigError, match="logprobs must be at most the vocabulary size 300, got 301"):
        SamplingParams(logprobs=301).check_vocab(300)


def test_params_and_bookkeeping_import_no_torch():
    code = (
        "import sys, specdecode.api.params, specdecode.sampling, specdecode.kv, specdecode.engine.scheduler;"
        "from specdecode.sampling import TokenHistory, needs_history, resolve_seed, UnseededStream;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
