"""LLM.generate(), example 6: streaming-style with progress bar."""

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

# Many prompts - show progress
prompts = [f"Explain concept {i}" for i in range(20)]
sampling_params = SamplingParams(temperature=0.0, max_tokens=100)

# use_tqdm=True shows progress (default)
outputs = llm.generate(prompts, sampling_params, use_tqdm=True)

print(f"Generated {len(outputs)} outputs")
print(f"Total tokens: {sum(len(o.outputs[0].token_ids) for o in outputs)}")
