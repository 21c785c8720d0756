"""Speculative decoding guide, "Prompt Lookup Decoding": the flat keywords of older versions."""

from example_model import example_model
from specdecode import LLM

# One warning prints the speculative_config to write instead.
llm = LLM(
    model=example_model(),
    speculative_model="[ngram]",
    num_speculative_tokens=5,
    ngram_prompt_lookup_max=4,
    ngram_prompt_lookup_min=1,
)
outputs = llm.generate("The future of AI is")
