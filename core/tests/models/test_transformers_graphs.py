"""Models of transformers are captured if trying shows that they can be; fakes stand for a GPU's graphs."""

from __future__ import annotations

import logging

import pytest
import torch
from specdecode import LLM, SamplingParams
from specdecode.api import assemble, overlapping
from specdecode.models import Capturable, load_model, resolve_model
from specdecode.runner import profiling
from specdecode.runner.graphs import Graphs
from specdecode.testing.foreign import foreign_checkpoint
from specdecode.testing.tiny import tiny_checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
WAITS = "called a synchronizing CUDA operation"
PHI = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}


class Recorded(Graphs):
    """Runs functions once when they are captured, and again when they are replayed."""

    trying = False

    def __init__(self, device, *, enabled=True):
        super().__init__(device, enabled=False)
        self.enabled = enabled

    def capture(self, fn, key):
        if not self.enabled:
            return fn
        Recorded.trying = True
        try:
            fn()
        finally:
            Recorded.trying = False
        self.captured[key] = fn
        return fn

    def clear(self):
        self.captured.clear()

    def report(self):
        return f"captured {len(self.captured)} graphs"


@pytest.fixture(autouse=True)
def recorded(monkeypatch):
    monkeypatch.delenv("SPECDECODE_CHECK_WRITES", raising=False)
    for module in (overlapping, profiling):
        monkeypatch.setattr(module, "Graphs", Recorded)

    def on_a_gpu(args, device):
        return overlapping.overlaps(args, device) and not args.enforce_eager

    for module in (overlapping, assemble):
        monkeypatch.setattr(module, "may_capture", on_a_gpu)


@pytest.fixture(scope="module")
def phi(tmp_path_factory):
    return foreign_checkpoint(tmp_path_factory.mktemp("phi"), "phi", PHI)


def run(path, config=NGRAM, **options):
    """Ids of each request, whether steps are captured, and the memory plan."""
    prompts = [[3 + (7 * i + j) % 40 for j in range(4 + 9 * i)] for i in range(3)]
    kinds = ({"temperature": 0}, {"temperature": 0.9, "seed": 5, "top_p": 0.9})
    params = [SamplingParams(max_tokens=16, ignore_eos=True, **kinds[i % 2]) for i in range(3)]
    with LLM(
        path,
        dtype="float32",
        device="cpu",
        max_model_len=96,
        num_gpu_blocks_override=100,
        max_num_seqs=4,
        skip_tokenizer_init=True,
        async_scheduling=True,
        speculative_config=config,
        **options,
    ) as llm:
        outputs = llm.generate([{"prompt_token_ids": own} for own in prompts], params, use_tqdm=False)
        core, memory = llm.llm_engine.core, llm.memory_plan()
        counts = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
        assert not counts.get("specdecode:proposer_failures")
        captured, graphs = core.steady.captured, core.steady.graphs
        assert captured == graphs.enabled == bool(graphs.captured)  # all of them or none
        return [list(output.outputs[0].token_ids) for output in outputs], captured, memory


def looking_where(monkeypatch, raises):
    """Have linear layers look at a value if ``raises(tokens)``: while a step is tried, that raises."""
    forward = torch.nn.Linear.forward

    def look(self, x):
        if Recorded.trying and raises(x.shape[-2]):
            raise RuntimeError(WAITS + "\nand more")
        return forward(self, x)

    monkeypatch.setattr(torch.nn.Linear, "forward", look)


@pytest.mark.parametrize(
    "config",
    [
        None,
        NGRAM,
        {"method": "scripted-eagle", "num_speculative_tokens": 3},
        {"method": "scripted-self-draft", "num_speculative_tokens": 3},
    ],
    ids=["none", "ngram", "taps", "draft-model"],
)
def test_what_looks_at_nothing_is_captured(phi, config, caplog):
    from specdecode.testing import scripted

    scripted.install()
    want, captured, _ = run(phi, config, enforce_eager=True)
    assert not captured
    with caplog.at_level(logging.WARNING):
        ids, captured, memory = run(phi, config)
    assert captured and ids == want and memory.graph_bytes > 0
    assert "captured" not in caplog.text


def test_what_looks_at_a_value_runs_without_graphs(phi, monkeypatch, caplog):
    want, _, _ = run(phi, enforce_eager=True)
    looking_where(monkeypatch, lambda tokens: True)
    with caplog.at_level(logging.WARNING):
        ids, captured, _ = run(phi)
    assert ids == want and not captured
    said = [record.message for record in caplog.records if "captured" in record.message]
    assert len(said) == 1
    for needle in (
        "PhiForCausalLM of transformers",
        f"RuntimeError: {WAITS} at `raise",
        "(test_transformers",
    ):
        assert needle in said[0]


def test_what_fails_in_some_bucket_alone_leaves_none(phi, monkeypatch, caplog):
    """The first trial does not see it: steps of 2 rows of 4 tokens are captured for the engine alone."""
    want, _, _ = run(phi, enforce_eager=True)
    looking_where(monkeypatch, lambda tokens: tokens == 8)
    with caplog.at_level(logging.WARNING):
        ids, captured, _ = run(phi)
    assert ids == want and not captured
    assert sum("PhiForCausalLM" in record.message for record in caplog.records) == 1


def test_eager_means_not_even_tried(phi, monkeypatch, caplog):
    looking_where(monkeypatch, lambda tokens: True)
    with caplog.at_level(logging.WARNING):
        _, captured, memory = run(phi, enforce_eager=True)
    assert not captured and memory.graph_bytes == 0 and "captured" not in caplog.text


def test_want_of_memory_is_no_fallback(phi, monkeypatch):
    def full(self, fn, key):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Recorded, "capture", full)
    with pytest.raises(torch.OutOfMemoryError):
        run(phi)


def test_what_is_ours_must_be_capturable(tmp_path, monkeypatch):
    def broken(self, fn, key):
        raise RuntimeError(WAITS)

    monkeypatch.setattr(Recorded, "capture", broken)
    with pytest.raises(RuntimeError, match="synchronizing"):
        run(tiny_checkpoint(tmp_path))


def test_a_failed_attempt_holds_no_tensors():
    class Tensor:
        """Can be watched."""

    import weakref

    seen = []

    def fails():
        tensor = Tensor()
        seen.append(weakref.ref(tensor))
        raise RuntimeError("no")

    graphs = Recorded(torch.device("cpu"))
    graphs.clear = lambda: seen.append(seen[0]())  # where memory is given back
    with graphs.attempt("this"):
        fails()
    assert seen[1] is None and not graphs.enabled


class Reads(TorchDispatchMode):
    """Raises where a value is read on the host, as torch does for a GPU if it is told to."""

    READING = tuple(
        getattr(torch.ops.aten, name) for name in ("_local_scalar_dense", "is_nonzero", "item", "nonzero")
    )

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket not in self.READING
        return func(*args, **(kwargs or {}))


class NoAttention:
    """Takes the place of attention, which on a CPU asks the metadata what it likes."""

    def write(self, key, value, cache, meta):
        pass

    def attend(self, query, cache, meta, *, scale, window):
        return query


ROPES = {
    "dynamic": (
        "phi",
        PHI | {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}},
    ),
    "longrope": (
        "phi3",
        PHI
        | {
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 100.0,
                "short_factor": [1.5] * 8,
                "long_factor": [4.0] * 8,
            },
        },
    ),
}


@pytest.mark.parametrize("name", ROPES)
def test_a_rope_that_could_grow_is_not_asked_whether_to(name, tmp_path, native, reference, prompt):
    path, ids = foreign_checkpoint(tmp_path, *ROPES[name]), prompt(60)
    logits = native(path, max_model_len=64).feed({"a": ids})[0]["a"]
    torch.testing.assert_close(logits, reference(path)(ids).logits[0], atol=1e-4, rtol=0)

    decoder = load_model(
        resolve_model(path), dtype=torch.float32, device=torch.device("cpu"), max_model_len=64
    )
    assert decoder.capturable is Capturable.TRIED
    decoder.backend = NoAttention()
    tokens = torch.arange(8)
    with torch.inference_mode(), Reads():
        hidden, _ = decoder(tokens, tokens, None, [None] * 2, (0, 1, 2))
        decoder.compute_logits(hidden)
