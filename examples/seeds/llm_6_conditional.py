"""LLM initialization, example 6: conditional speculation."""

from example_model import example_model
from specdecode import LLM, SamplingParams

# Disable speculation when batch size is large
llm = LLM(
    model=example_model(),
    speculative_config={
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_max": 4,
        "disable_by_batch_size": 8,  # no drafts while 8 or more requests run
    },
)

# Large batch - speculation is disabled automatically
large_batch = ["Prompt " + str(i) for i in range(10)]
outputs = llm.generate(large_batch, SamplingParams(max_tokens=50))
