"""LLM initialization, example 1: basic n-gram speculation."""

from example_model import example_model
from specdecode import LLM, SamplingParams

# Initialize with ngram speculation (no draft model needed)
llm = LLM(
    model=example_model(),
    tensor_parallel_size=1,
    speculative_config={
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_max": 4,
    },
)

# Generate with speculation
prompts = ["The capital of France is", "Write a Python function to"]
sampling_params = SamplingParams(temperature=0.0, max_tokens=100)
outputs = llm.generate(prompts, sampling_params)

for output in outputs:
    print(f"Prompt: {output.prompt}")
    print(f"Generated: {output.outputs[0].text}")
    print("-" * 50)
