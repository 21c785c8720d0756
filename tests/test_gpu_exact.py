"""On a GPU: the same tokens alone and in a batch, with and without speculation, with graphs and without.

Equal to the last token, in float32 and in bfloat16, without a rule for near ties: rows are invariant, so
there are none. What is compared with is each request decoded alone, in the plain order and without graphs.
"""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="wants a GPU"),
    pytest.mark.usefixtures("captured_steps"),
]

#: Name -> family and shape: heads of 64 in groups of four, as most models have them; and heads that are
#: normalised and do not fill the hidden size.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2}),
    "qwen3": ("qwen3", {"hidden_size": 192, "num_attention_heads": 4, "num_key_value_heads": 1}),
}
VOCAB_SIZE, MAX_MODEL_LEN, NUM_REQUESTS, NEW_TOKENS = 1000, 512, 20, 40
TREE = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]
SAMPLING = (
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 5},
    {"temperature": 0.9, "seed": 6, "top_k": 20},
    {"temperature": 1.1, "seed": 7, "top_p": 0.9, "min_p": 0.01},
)


def proposers(texts: list[list[int]]) -> dict[str, dict[str, Any] | None]:
    eagle = {"method": "scripted-eagle", "num_speculative_tokens": 4}
    oracle = {"method": "scripted-oracle", "num_speculative_tokens": 5, "texts": texts}
    return {
        "plain": None,
        "ngram": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1},
        "oracle": oracle | {"wrong_at": [3]},
        "oracle-tree": {"method": "scripted-oracle-tree", "num_speculative_tokens": 8, "texts": texts},
        "self-draft": {"method": "scripted-self-draft", "num_speculative_tokens": 3},
        "eagle": eagle,
        "eagle3-fixed-tree": eagle | {"three_taps": True, "tree": TREE, "num_speculative_tokens": len(TREE)},
        "eagle-grown-tree": eagle | {"fanout": 2, "depth": 3, "num_speculative_tokens": 8},
        "medusa": {"method": "scripted-medusa"},
    }


#: Those of which some drafts must have been accepted.
ACCEPTED = ("ngram", "oracle", "oracle-tree", "self-draft")


class Target:
    """A checkpoint in one dtype, the requests, and what each of them gives alone."""

    def __init__(self, path: str, dtype: str) -> None:
        from specdecode import SamplingParams

        self.path, self.dtype = path, dtype
        generator = torch.Generator().manual_seed(1)
        # Lengths about the borders of KV blocks and of attention's tiles of 64.
        lengths = [1, 2, 15, 16, 17, 33, 50, 62, 63, 64, 65, 66, 100, 127, 128, 129, 150, 190, 191, 192]
        self.prompts, self.params = [], []
        for index, length in enumerate(lengths[:NUM_REQUESTS]):
            # Half of a prompt is its other half again, so that there is something to look up.
            half = torch.randint(3, VOCAB_SIZE, (-(-length // 2),), generator=generator).tolist()
            self.prompts.append({"prompt_token_ids": (half + half)[:length]})
            wish = SAMPLING[index % len(SAMPLING)]
            self.params.append(
                SamplingParams(**wish, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
            )
        with self.engine(None, enforce_eager=True, async_scheduling=False, max_num_seqs=1) as alone:
            self.expected = [
                self._ids(alone.generate([prompt], params, use_tqdm=False))[0]
                for prompt, params in zip(self.prompts, self.params, strict=True)
            ]
        self.texts = [
            prompt["prompt_token_ids"] + ids for prompt, ids in zip(self.prompts, self.expected, strict=True)
        ]

    def engine(self, speculation: dict[str, Any] | None, **options: Any) -> Any:
        from specdecode import LLM

        common = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 12, "num_gpu_blocks_override": 600}
        return LLM(
            self.path,
            speculative_config=speculation,
            dtype=self.dtype,
            device="cuda",
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            **common | options,
        )

    def together(self, llm: Any) -> list[list[int]]:
        return self._ids(llm.generate(self.prompts, self.params, use_tqdm=False))

    @staticmethod
    def _ids(outputs: Any) -> list[list[int]]:
        return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    from specdecode.testing import scripted
    from specdecode.testing.tiny import tiny_checkpoint

    scripted.install()
    made: dict[tuple[str, str], Target] = {}

    def get(name: str, dtype: str) -> Target:
        if (name, dtype) not in made:
            family, shape = MODELS[name]
            path = tiny_checkpoint(
                tmp_path_factory.mktemp("exact") / name,
                family,
                vocab_size=VOCAB_SIZE,
                output_scale=0.5,
                num_hidden_layers=3,
                intermediate_size=640,
                max_position_embeddings=MAX_MODEL_LEN,
                **shape,
            )
            made[name, dtype] = Target(str(path), dtype)
        return made[name, dtype]

    return get


def _metrics(llm: Any) -> collections.Counter[str]:
    values: collections.Counter[str] = collections.Counter()
    for metric in llm.get_metrics():
        if isinstance(metric.value, (int, float)):
            values[metric.name] += metric.value
    return values


in_both_dtypes = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
of_both_models = pytest.mark.parametrize("model", list(MODELS))


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("proposer", list(proposers([])))
@of_both_models
@in_both_dtypes
def test_output_is_that_of_each_request_alone(targets, model, dtype, proposer, eager):
    target = targets(model, dtype)
    with target.engine(proposers(target.texts)[proposer], enforce_eager=eager) as llm:
        assert llm.llm_engine.core.steady.captured == (not eager)
        got = target.together(llm)
        metrics = _metrics(llm)
    differing = [
        (index, next(i for i, pair in enumerate(zip(ids, want, strict=True)) if pair[0] != pair[1]))
        for index, (ids, want) in enumerate(zip(got, target.expected, strict=True))
        if ids != want
    ]
    assert not differing, f"request, first differing token: {differing}"
    assert metrics["specdecode:proposer_failures"] == metrics["specdecode:drafts_dropped_by_fault"] == 0
    if proposer != "plain":
        assert metrics["vllm:spec_decode_num_draft_tokens"] > 0
    if proposer in ACCEPTED:
        assert metrics["vllm:spec_decode_num_accepted_tokens"] > 0


@pytest.mark.parametrize("proposer", ["plain", "ngram", "eagle3-fixed-tree"])
@in_both_dtypes
def test_chunks_and_preemption_change_nothing(targets, dtype, proposer):
    """Prompts in chunks of 24 tokens beside decoding rows, and a KV cache that is too small for all."""
    target = targets("llama", dtype)
    speculation = proposers(target.texts)[proposer]
    small = {"max_num_batched_tokens": 160, "num_gpu_blocks_override": 60}
    with target.engine(speculation, **small) as llm:
        assert target.together(llm) == target.expected
        assert _metrics(llm)["vllm:num_preemptions"] > 0


@in_both_dtypes
def test_exact_false_changes_nothing_on_a_gpu(targets, dtype):
    target = targets("llama", dtype)
    with target.engine(proposers(target.texts)["ngram"], exact=False) as llm:
        assert target.together(llm) == target.expected


@in_both_dtypes
def test_a_row_that_depends_on_its_neighbours_is_seen(targets, dtype, monkeypatch):
    """The comparison would notice: noise of the size of a rounding, where rows stand beside each other."""
    from specdecode.models import Decoder

    target = targets("llama", dtype)
    logits = Decoder.logits

    def neighbourly(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        found = logits(self, hidden)
        return found if hidden.shape[0] == 1 else found * (1 + 0.01 * torch.rand_like(found))

    monkeypatch.setattr(Decoder, "logits", neighbourly)
    with target.engine(None, enforce_eager=True) as llm:
        assert target.together(llm) != target.expected
