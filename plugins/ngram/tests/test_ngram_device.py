"""The twin on the device drafts what the host's drafts, row by row, and counts the same."""

import types

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specdec_ngram.config import NgramConfig
from specdec_ngram.device import DeviceNgramProposer
from specdec_ngram.plugin import specdecode_proposers
from specdec_ngram.proposer import NgramProposer
from specdecode import LLM, SamplingParams
from specdecode.contract import Drafts, Needs, Place, RequestInfo, StepView, Tokens
from specdecode.plugins import PluginManager, default_manager, hookimpl
from specdecode.testing.conformance import Case, parametrize_with_checks
from specdecode.testing.tiny import tiny_checkpoint

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@attrs.frozen
class Rows:
    """A StepSource for either place."""

    texts: list
    limits: list
    size: int = 0  #: columns of the history; what lies behind a text is no part of it
    device: str = "cpu"

    def rows(self, name, place):
        if place is Place.HOST:
            return {
                "request_ids": [str(row) for row in range(len(self.texts))],
                "history": self.texts,
                "budget": np.array(self.limits),
                "room": np.full(len(self.limits), 99),
            }[name]
        if name == "history":
            longest = max(self.size, *map(len, self.texts))
            rows = [[*text, *[text[-1]] * (longest - len(text))] for text in self.texts]
            return torch.tensor(rows, dtype=torch.int32, device=self.device)
        values = {
            "budget": self.limits,
            "room": [99] * len(self.limits),
            "committed_len": [len(text) for text in self.texts],
        }
        return torch.tensor(values[name], device=self.device)

    def limit(self, name, value, bound, place):
        return np.minimum(value, bound) if place is Place.HOST else value.clamp(max=bound)


def needs_on(device, config):
    (spec,) = specdecode_proposers()
    return spec.needs(config, types.SimpleNamespace(target=types.SimpleNamespace(device=device)))


def drafts_of(proposer, needs, source):
    shape = (len(source.texts), needs.width)
    if needs.place is Place.HOST:
        out = Drafts(
            ids=np.zeros(shape, np.int64),
            lens=np.zeros(shape[0], np.int64),
            parents=None,
            score=np.zeros(shape, np.float32),
        )
    else:
        ids = torch.full(shape, -7, device=source.device)
        out = Drafts(ids=ids, lens=torch.zeros(shape[0], dtype=torch.int64, device=source.device),
                     parents=None, score=torch.zeros(shape, device=source.device))  # fmt: skip
    proposer.propose(StepView(needs, source), out)
    counts = out.lens.tolist()
    ids = [own[:count] for own, count in zip(out.ids.tolist(), counts, strict=True)]
    scores = [own[:count].tolist() for own, count in zip(np.asarray(out.score).round(4), counts, strict=True)]
    return ids, scores


def on_host(config, source):
    proposer = NgramProposer(config)
    for row, text in enumerate(source.texts):
        proposer.on_add(RequestInfo(id=str(row), namespace="", token_ids=text, prompt_len=len(text),
                                    params=None, resumed=False))  # fmt: skip
    return drafts_of(proposer, needs_on("cpu", config), source), proposer.metrics()


def on_device(config, source):
    proposer = DeviceNgramProposer(config)
    proposer.load(types.SimpleNamespace(device=torch.device(source.device)))
    return drafts_of(proposer, needs_on("cuda:0", config), source), proposer.metrics()


def looping(draw):
    period = draw(st.lists(st.integers(0, 5), min_size=1, max_size=7))
    return (draw(st.lists(st.integers(0, 5), max_size=9)) + period * 8)[: draw(st.integers(1, 50))]


TEXTS = st.lists(
    st.one_of(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.composite(looping)()),
    min_size=1,
    max_size=4,
)


@pytest.mark.parametrize("device", DEVICES)
@settings(deadline=None)
@given(
    texts=TEXTS,
    bounds=st.tuples(st.integers(1, 8), st.integers(1, 8)).map(sorted),
    k=st.integers(1, 12),
    limits=st.lists(st.integers(0, 12), min_size=4, max_size=4),
    spare=st.integers(0, 70),
)
def test_both_draft_the_same(device, texts, bounds, k, limits, spare):
    config = NgramConfig(num_speculative_tokens=k, prompt_lookup_min=bounds[0], prompt_lookup_max=bounds[1])
    source = Rows(texts, limits[: len(texts)], spare, device)
    assert on_device(config, source) == on_host(config, source)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [1000, 5000])
def test_both_draft_the_same_in_long_texts(device, size):
    rng = np.random.default_rng(size)
    texts = [rng.integers(0, values, size - 37 * row).tolist() for row, values in enumerate((2, 9, 300))]
    source = Rows(texts, [10, 3, 10], size + 100, device)
    for shortest, longest in ((1, 3), (2, 5), (4, 12)):
        config = NgramConfig(num_speculative_tokens=10, prompt_lookup_min=shortest, prompt_lookup_max=longest)
        assert on_device(config, source) == on_host(config, source)


def test_the_needs_follow_the_targets_device():
    config = NgramConfig(num_speculative_tokens=3)
    host, device = needs_on("cpu", config), needs_on("cuda", config)
    assert (host.place, host.graphs, host.tokens) == (Place.HOST, False, Tokens.HISTORY)
    assert (device.place, device.graphs, device.tokens) == (Place.DEVICE, True, Tokens.HISTORY)
    assert (device.width, device.depth) == (3, 3) and not device.kv


# -- in the engine ---------------------------------------------------------------------------------
class OnDevice:
    """The plugin, with a target that says it is on a GPU."""

    @hookimpl
    def specdecode_proposers(self):
        (spec,) = specdecode_proposers()

        def needs(config, context) -> Needs:
            return spec.needs(config, types.SimpleNamespace(target=types.SimpleNamespace(device="cuda:0")))

        yield attrs.evolve(spec, name="ngram-on-device", needs=needs)


def manager():
    made = PluginManager()
    made.register(OnDevice(), name="ngram-on-device")
    return made


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    torch.set_num_threads(1)
    return str(tiny_checkpoint(tmp_path_factory.mktemp("tiny"), zero_outputs=True))


@pytest.fixture
def _registered():
    default_manager().register(OnDevice(), name="ngram-on-device")
    yield
    default_manager().unregister("ngram-on-device")


CASE = Case(
    method="ngram-on-device",
    config={"num_speculative_tokens": 4, "prompt_lookup_min": 1},
    manager=manager(),
)


@parametrize_with_checks([CASE])
def test_conformance(check):
    check()


@pytest.mark.usefixtures("_registered")
@pytest.mark.parametrize("late", [False, True])
def test_the_engine_runs_both_alike(checkpoint, late):
    prompts = [{"prompt_token_ids": ids} for ids in ([100, 101, 102] * 5, [60, 61], [7, 8, 9, 7, 8])]
    params = [
        SamplingParams(temperature=temperature, seed=3, max_tokens=30, ignore_eos=True)
        for temperature in (0.0, 0.8, 0.0)
    ]
    seen = []
    for method in ("ngram", "ngram-on-device"):
        config = {"method": method, "num_speculative_tokens": 4}
        options = {"device": "cpu", "max_num_batched_tokens": 64, "async_scheduling": late}
        with LLM(checkpoint, dtype="float32", speculative_config=config, **options) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            counts = {metric.name: metric.value for metric in llm.get_metrics()}
        seen.append(
            (
                [(output.outputs[0].token_ids, output.outputs[0].token_sources) for output in outputs],
                counts["vllm:spec_decode_num_draft_tokens"],
                counts[f"{method}.lookups"],
                counts[f"{method}.hits"],
            )
        )
    assert seen[0] == seen[1]
    assert seen[0][1] > 20
