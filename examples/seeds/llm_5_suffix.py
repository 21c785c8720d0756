"""LLM initialization, example 5: suffix decoding for repetitive tasks."""

from example_model import example_model
from specdecode import LLM, SamplingParams

# Suffix decoding excels at repetitive patterns
llm = LLM(
    model=example_model(),
    speculative_config={
        "method": "suffix",
        "num_speculative_tokens": 32,  # Maximum, adjusted dynamically
        "suffix_decoding_max_spec_factor": 1.0,
        "suffix_decoding_min_token_prob": 0.1,
        "suffix_decoding_max_cached_requests": 1000,
    },
)

# Example: Code refactoring (repetitive patterns)
prompts = [
    "Refactor this code to use list comprehension: result = []\nfor i in range(10):\n    result.append(i*2)"
]
outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=200))
