from vllm import LLM, SamplingParams

llm = LLM(model="MODEL", max_model_len=512)
sampling_params = llm.get_default_sampling_params()
sampling_params.max_tokens = 20
sampling_params.seed = 11


def print_outputs(outputs):
    print("\nGenerated Outputs:\n" + "-" * 80)
    for output in outputs:
        print(f"Prompt: {output.prompt!r}\n")
        print(f"Generated text: {output.outputs[0].text!r}")
        print("-" * 80)


conversation = [
    {"role": "system", "content": "You are a helpful assistant"},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello! How can I assist you today?"},
    {"role": "user", "content": "Write an essay about the importance of higher education."},
]
outputs = llm.chat(conversation, sampling_params, use_tqdm=False)
print_outputs(outputs)

conversations = [conversation for _ in range(4)]
outputs = llm.chat(messages=conversations, sampling_params=sampling_params, use_tqdm=True)
print_outputs(outputs)

template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
outputs += llm.chat(
    conversations,
    SamplingParams(max_tokens=5, stop=["\n"], include_stop_str_in_output=True),
    chat_template=template,
    add_generation_prompt=False,
)
