"""LLM.generate(), example 1: basic speculative generation."""

from example_model import example_model
from specdecode import LLM, SamplingParams

# Initialize with ngram speculation
llm = LLM(
    model=example_model(),
    speculative_config={
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_max": 4,
    },
)

# Generate with speculation
prompts = [
    "The capital of France is",
    "To define a function in Python, use",
]
sampling_params = SamplingParams(temperature=0.0, max_tokens=50)

outputs = llm.generate(prompts, sampling_params)

for output in outputs:
    print(f"Prompt: {output.prompt}")
    print(f"Generated: {output.outputs[0].text}")
    print(f"Finish reason: {output.outputs[0].finish_reason}")
    print("-" * 50)
