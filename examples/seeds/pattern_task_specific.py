"""LLM.generate(), pattern: task-specific optimization; its second half wants EAGLE (see README.md)."""

from example_model import example_model
from specdecode import LLM, SamplingParams

# Code generation: ngram works well
code_llm = LLM(model=example_model(), speculative_config={"method": "ngram", "num_speculative_tokens": 5})

outputs = code_llm.generate("def factorial(n):", SamplingParams(temperature=0.0, max_tokens=50))
