from functools import partial

from tqdm import tqdm
from vllm import LLM, EngineArgs, PromptType, RequestOutput, SamplingParams
from vllm.inputs import TextPrompt, TokensPrompt
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind

llm = LLM.from_engine_args(EngineArgs(model="MODEL", max_model_len=128, seed=3))
tokenizer = llm.get_tokenizer()
ids = tokenizer.encode("The quick brown fox")
prompts: list[PromptType] = [
    "The quick brown fox",
    ids,
    {"prompt": "The quick brown fox"},
    {"prompt_token_ids": ids},
    TextPrompt(prompt="The quick brown fox"),
    TokensPrompt(prompt_token_ids=ids, prompt="The quick brown fox"),
]
params = llm.get_default_sampling_params()
params.temperature = 0.0
params.max_tokens = 12
assert params.output_kind is RequestOutputKind.CUMULATIVE
outputs = llm.generate(prompts, params, use_tqdm=partial(tqdm, desc="My bar", leave=False))
outputs += llm.generate(ids, [params.clone()], use_tqdm=False)
outputs += llm.generate([ids, ids], SamplingParams.from_optional(temperature=0.0, n=None, max_tokens=12))
for output in outputs:
    assert isinstance(output, RequestOutput) and isinstance(output.outputs[0], CompletionOutput)
    whole = output.prompt_token_ids + output.outputs[0].token_ids
    print(output.request_id, len(whole), tokenizer.decode(whole))
