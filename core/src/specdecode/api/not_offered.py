"""What vLLM's LLM and SamplingParams have beside ours: why each is refused, and what to do instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_POOLING = "only text generation is built: a model that embeds, classifies or scores wants another engine"
_WEIGHTS = "update_weights(source) reads a checkpoint, or tensors, in one call"
_WORKERS = "look into the engine of this process by llm.llm_engine; update_weights changes the model"
_QUEUE = "generate takes all prompts at once; llm.llm_engine.add_request and step let them come one by one"

#: Method or attribute of LLM -> what to do instead.
MEMBERS: Mapping[str, str] = {
    **dict.fromkeys(("encode", "embed", "classify", "reward", "score"), _POOLING),
    **dict.fromkeys(("enqueue", "enqueue_chat", "wait_for_completion"), _QUEUE),
    **dict.fromkeys(("collective_rpc", "apply_model"), _WORKERS),
    **dict.fromkeys(
        (
            "init_weight_transfer_engine",
            "start_weight_update",
            "start_draft_weight_update",
            "finish_weight_update",
        ),
        _WEIGHTS,
    ),
    **dict.fromkeys(
        ("sleep", "wake_up"),
        "the engine cannot be put to sleep: shutdown() frees everything, and a new LLM starts again",
    ),
    **dict.fromkeys(
        ("start_profile", "stop_profile"),
        "read get_metrics(), or profile a workload with specdecode bench --profile",
    ),
    "beam_search": "SamplingParams(n=..., temperature=...) draws several answers, logprobs ranks them",
    "reset_mm_cache": "images are cached with the prompts that hold them: reset_prefix_cache()",
    "model_config": "llm.llm_engine.target holds the model's facts, max_model_len and vocab_size among them",
    "get_world_size": "it is tensor_parallel_size: llm.llm_engine.args.tensor_parallel_size",
}

_BEAMS = "beam search is not built: n and temperature give several answers, logprobs ranks them"

#: Field of SamplingParams -> values beside None that ask for nothing, and what to do instead.
FIELDS: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "extra_args": (({},), "give logits_processors what they are to know when you make them"),
    "flat_logprobs": ((False,), "logprobs are a list of dicts"),
    "logprob_token_ids": (([],), "logprobs=-1 gives those of the whole vocabulary"),
    "repetition_detection": (
        (),
        "repetition_penalty and frequency_penalty keep an output from going round, max_tokens ends it",
    ),
    "routed_experts_prompt_start": ((0,), "which experts a token went to is not given out"),
    "skip_clone": ((False,), "a request keeps a copy of its own"),
    "skip_reading_prefix_cache": (
        (False,),
        "give the prompt a cache_salt of its own, or start the engine with enable_prefix_caching=False",
    ),
    "thinking_token_budget": ((-1,), "max_tokens bounds thinking and answer together"),
    "use_beam_search": ((False,), _BEAMS),
    "length_penalty": ((1.0,), _BEAMS),
    "early_stopping": ((False,), _BEAMS),
}

#: Argument of ``generate`` and ``chat`` -> what to do instead.
ARGUMENTS: Mapping[str, str] = {
    "tokenization_kwargs": (
        "truncate_prompt_tokens of SamplingParams shortens a prompt; tokenize it yourself for the rest, and "
        "pass its token ids"
    ),
    "mm_processor_kwargs": (
        "images are prepared as the checkpoint's preprocessor_config.json says: change that"
    ),
}


def argument_faults(**arguments: Any) -> list[str]:
    """A fault for each of :data:`ARGUMENTS` that asks for something."""
    return [f"{name}={value!r} is refused: {ARGUMENTS[name]}" for name, value in arguments.items() if value]
