"""LLM.generate(), example 4: speculation with TokensPrompt."""

from example_model import example_model
from specdecode import LLM, SamplingParams
from specdecode.inputs import TokensPrompt
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(example_model())
llm = LLM(
    model=example_model(),
    speculative_config={
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_max": 4,
    },
)

# Pre-tokenize for fine control
prompts_text = [
    "def add(a, b): return a + b\ndef subtract(a, b):",
    "The first law of thermodynamics states",
]

tokens_prompts = [
    TokensPrompt(prompt_token_ids=tokenizer.encode(p, add_special_tokens=False)) for p in prompts_text
]

outputs = llm.generate(tokens_prompts, SamplingParams(temperature=0.0, max_tokens=100))

for output in outputs:
    print(f"Generated: {output.outputs[0].text}")
