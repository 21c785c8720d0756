"""Output does not depend on what is drafted."""

import json

import pytest
import torch
from specdecode import LLM, SamplingParams
from specdecode.testing.tiny import table_checkpoint, tiny_checkpoint

PROMPTS = [{"prompt_token_ids": [7, 8, 9]}, {"prompt_token_ids": [11]}]
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=40, ignore_eos=True, temperature=1.0, seed=5)


def table(path):
    # Its next token is most often the last one plus one, of 16.
    return table_checkpoint(path, 6 * torch.eye(16).roll(1, dims=1))


@pytest.fixture(scope="module", params=[table, tiny_checkpoint], ids=["table", "tiny"])
def model(request, tmp_path_factory):
    torch.set_num_threads(1)
    return str(request.param(tmp_path_factory.mktemp("model") / "target"))


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_the_output_is_what_it_is_without_speculation(model, tmp_path, params, tree):
    options = dict(model=model, skip_tokenizer_init=True, device="cpu", dtype="float32", max_num_seqs=2)
    plain = [o.outputs[0].token_ids for o in LLM(**options).generate(PROMPTS, params)]
    answers = tmp_path / "answers.jsonl"
    # Past answers that went the same way for a while, then another.
    answers.write_text("".join(json.dumps({"token_ids": [*ids[:25], 3, 3, 3]}) + "\n" for ids in plain))
    spec = {
        "method": "retrieval",
        "datastore": str(answers),
        "num_speculative_tokens": 5,
        "retrieval_tree": tree,
    }
    llm = LLM(**options, speculative_config=spec)
    drafted = llm.generate(PROMPTS, params)
    assert [o.outputs[0].token_ids for o in drafted] == plain
    metrics = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    drafted_tokens = metrics["vllm:spec_decode_num_draft_tokens"]
    assert 20 < metrics["vllm:spec_decode_num_accepted_tokens"] < drafted_tokens
