from vllm import LLM, SamplingParams
from vllm.v1.metrics.reader import Counter, Gauge, Histogram, Vector

num_spec_tokens = 3
llm = LLM(
    model="MODEL",
    trust_remote_code=True,
    tensor_parallel_size=1,
    enable_chunked_prefill=False,
    enforce_eager=False,
    gpu_memory_utilization=0.9,
    speculative_config={
        "method": "ngram",
        "num_speculative_tokens": num_spec_tokens,
        "prompt_lookup_max": 5,
        "prompt_lookup_min": 2,
    },
    disable_log_stats=False,
    max_model_len=512,
)
sampling_params = SamplingParams(temperature=0, max_tokens=100)
prompt_ids = llm.get_tokenizer()(["The rain in Spain stays " * 4, "One two three. One two"]).input_ids
outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompt_ids], sampling_params=sampling_params)
for output in outputs:
    print("-" * 50)
    print(f"prompt: {output.prompt}")
    print(f"generated text: {output.outputs[0].text}")

metrics = llm.get_metrics()
total_num_output_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
num_drafts = 0
num_draft_tokens = 0
num_accepted_tokens = 0
acceptance_counts = [0] * num_spec_tokens
for metric in metrics:
    if metric.name == "vllm:spec_decode_num_drafts":
        assert isinstance(metric, Counter)
        num_drafts += metric.value
    elif metric.name == "vllm:spec_decode_num_draft_tokens":
        assert isinstance(metric, Counter)
        num_draft_tokens += metric.value
    elif metric.name == "vllm:spec_decode_num_accepted_tokens":
        assert isinstance(metric, Counter)
        num_accepted_tokens += metric.value
    elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
        assert isinstance(metric, Vector)
        for pos in range(len(metric.values)):
            acceptance_counts[pos] += metric.values[pos]

print("-" * 50)
print(f"total_num_output_tokens: {total_num_output_tokens}")
print(f"num_drafts: {num_drafts}")
print(f"num_draft_tokens: {num_draft_tokens}")
print(f"num_accepted_tokens: {num_accepted_tokens}")
acceptance_length = 1 + (num_accepted_tokens / num_drafts) if num_drafts > 0 else 1
print(f"mean acceptance length: {acceptance_length:.2f}")
for i in range(len(acceptance_counts)):
    rate = acceptance_counts[i] / num_drafts if num_drafts > 0 else 0
    print(f"acceptance at token {i}: {rate:.2f}")

for metric in metrics:
    if isinstance(metric, Gauge):
        print(f"{metric.name} (gauge) = {metric.value}")
    elif isinstance(metric, Counter):
        print(f"{metric.name} (counter) = {metric.value}")
    elif isinstance(metric, Vector):
        print(f"{metric.name} (vector) = {metric.values}")
    elif isinstance(metric, Histogram):
        print(f"{metric.name} (histogram)")
        print(f"    sum = {metric.sum}")
        print(f"    count = {metric.count}")
        for bucket_le, value in metric.buckets.items():
            print(f"    {bucket_le} = {value}")
