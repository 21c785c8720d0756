"""LLM.generate(), example 3: batch generation with mixed lengths."""

from example_model import example_model
from specdecode import LLM, SamplingParams

llm = LLM(
    model=example_model(),
    speculative_config={
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_max": 4,
    },
)

# Different prompt lengths - speculation adapts per request
prompts = [
    "Hi",  # Short prompt
    "Write a detailed explanation of quantum mechanics",  # Long prompt
    "def factorial(n):",  # Code prompt (good for ngram)
]

# Different max_tokens per prompt
sampling_params_list = [
    SamplingParams(temperature=0.0, max_tokens=10),  # Short generation
    SamplingParams(temperature=0.0, max_tokens=300),  # Long generation
    SamplingParams(temperature=0.0, max_tokens=100),  # Medium generation
]

outputs = llm.generate(prompts, sampling_params_list)

for i, output in enumerate(outputs):
    print(f"Prompt {i}: {output.prompt}")
    print(f"Generated tokens: {len(output.outputs[0].token_ids)}")
    print(f"Text: {output.outputs[0].text[:100]}...")
    print("-" * 50)
