"""LLM.generate(), pattern: adaptive generation."""

from example_model import example_model
from specdecode import LLM, SamplingParams

# Start with speculation, disable if not effective
llm = LLM(
    model=example_model(),
    speculative_config={
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_max": 4,
        "disable_by_batch_size": 16,  # Auto-disable for large batches
    },
)

outputs = llm.generate(["def add(a, b):"] * 4, SamplingParams(temperature=0.0, max_tokens=50))
