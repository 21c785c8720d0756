from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

llm = LLM("MODEL", dtype="float32", seed=0, max_num_seqs=8)
params = [
    SamplingParams(n=4, temperature=0.9, top_k=40, min_p=0.05, seed=5, max_tokens=12),
    SamplingParams(temperature=0.7, presence_penalty=0.5, frequency_penalty=0.2, repetition_penalty=1.1),
    SamplingParams(n=2, bad_words=["the"], logit_bias={5: -100.0}, stop_token_ids=[2], min_tokens=3),
    SamplingParams(allowed_token_ids=[70, 71, 72], ignore_eos=True, max_tokens=6, skip_special_tokens=False),
    SamplingParams(structured_outputs=StructuredOutputsParams(choice=["Positive", "Negative"])),
]
prompts = [f"Tell me a story about number {i}." for i in range(len(params))]
outputs = llm.generate(prompts, sampling_params=params)
for output in outputs:
    assert output.finished
    for completion in output.outputs:
        print(output.request_id, completion.index, completion.finish_reason, repr(completion.text))
        assert completion.finished()
assert [len(output.outputs) for output in outputs] == [4, 1, 2, 1, 1]
assert outputs[-1].outputs[0].text in ("Positive", "Negative")
print(outputs[0])
