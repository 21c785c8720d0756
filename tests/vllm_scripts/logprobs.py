import math

from vllm import LLM, SamplingParams
from vllm.outputs import Logprob

llm = LLM(model="MODEL", max_model_len=256)
params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=3, prompt_logprobs=2)
outputs = llm.generate(["The capital of France is"], params)
completion = outputs[0].outputs[0]
for token_id, candidates in zip(completion.token_ids, completion.logprobs, strict=True):
    chosen = candidates[token_id]
    assert isinstance(chosen, Logprob)
    print(f"{chosen.decoded_token!r} rank={chosen.rank} p={math.exp(chosen.logprob):.3f}")
    for other, logprob in candidates.items():
        print(f"    {other}: {logprob.decoded_token!r} {logprob.logprob:.3f}")
print("cumulative:", completion.cumulative_logprob)

first, *rest = outputs[0].prompt_logprobs
assert first is None
total = sum(entry[token].logprob for token, entry in zip(outputs[0].prompt_token_ids[1:], rest, strict=True))
print("prompt perplexity:", math.exp(-total / len(rest)))

whole = llm.generate(["The capital"], SamplingParams(max_tokens=1, logprobs=-1))
assert len(whole[0].outputs[0].logprobs[0]) == len(llm.get_tokenizer())
