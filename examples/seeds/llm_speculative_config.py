"""LLM initialization, "Import": SpeculativeConfig instead of a dict."""

from example_model import example_model
from specdecode import LLM, SamplingParams
from specdecode.config import SpeculativeConfig  # For advanced usage

config = SpeculativeConfig(method="ngram", num_speculative_tokens=5, prompt_lookup_max=4)
llm = LLM(model=example_model(), speculative_config=config)
outputs = llm.generate("The capital of France is", SamplingParams(temperature=0.0, max_tokens=50))
print(config.method, config.num_speculative_tokens, outputs[0].outputs[0].text)
