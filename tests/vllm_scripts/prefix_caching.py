from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

prefix = "You are an expert school principal. Draft interview questions for a new teacher. " * 2
prompts = ["Hello, my name is", "The capital of France is", "The future of AI is"]
generating_prompts = [prefix + prompt for prompt in prompts]
sampling_params = SamplingParams(temperature=0.0)

regular_llm = LLM(model="MODEL", gpu_memory_utilization=0.4)
print("Results without `enable_prefix_caching`")
outputs = regular_llm.generate(generating_prompts, sampling_params)
regular_generated_texts = [output.outputs[0].text for output in outputs]
del regular_llm
cleanup_dist_env_and_memory()

prefix_cached_llm = LLM(model="MODEL", enable_prefix_caching=True, gpu_memory_utilization=0.4)
prefix_cached_llm.generate(generating_prompts[0], sampling_params)  # warm up
outputs = prefix_cached_llm.generate(generating_prompts, sampling_params)
cached_generated_texts = [output.outputs[0].text for output in outputs]
generated_same = all(
    regular == cached for regular, cached in zip(regular_generated_texts, cached_generated_texts, strict=True)
)
cached = [output.num_cached_tokens for output in outputs]
print(f"Generated answers are the same: {generated_same}; tokens found in the cache: {cached}")
assert prefix_cached_llm.reset_prefix_cache()
