"""EngineArgs: everything an engine is made from, by vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs

from ..config import structure
from ..contract import ConfigError, option, within
from ..structured.params import StructuredOutputsConfig
from .keywords import drop_foreign, foreign_keywords
from .legacy import FLAT, OLD, ROOT, modernise

#: Keys of vLLM's ``limit_mm_per_prompt``.
MODALITIES = ("image", "video", "audio", "vision_chunk")


def _fraction(_: Any, __: Any, value: float) -> None:
    if not 0 < value <= 1:
        raise ValueError(f"must be above 0 and at most 1, got {value!r}")


def _share(_: Any, __: Any, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"must be between 0 and 1, got {value!r}")


def _limits(_: Any, __: Any, value: Mapping[str, int] | None) -> None:
    for name, limit in (value or {}).items():
        if name not in MODALITIES:
            raise ValueError(f"must have keys of {', '.join(MODALITIES)}, got {name!r}")
        if limit < 0:
            raise ValueError(f"must give numbers of items from 0 on, got {limit} for {name!r}")
        if limit and name != "image":
            raise ValueError(f"asks for {name} inputs, which are not built: leave it out, or say 0")


@attrs.frozen(kw_only=True, slots=False)  # scripts spread vars() of it into LLM
class EngineFields:
    """The keywords that mean something here, checked; :class:`EngineArgs` takes vLLM's others as well."""

    model: str = option("Hugging Face directory or hub id, or a .gguf file")
    runner: Literal["auto", "generate"] = option("what the model is for", default="auto")
    tokenizer: str | None = option("path or hub id of the tokenizer; none: the model's", default=None)
    tokenizer_mode: Literal["auto", "fast", "hf"] = option(
        "all are the same: the model's tokenizer for transformers, which has no slow ones", default="auto"
    )
    skip_tokenizer_init: bool = option("take and give token ids only", default=False)
    trust_remote_code: bool = option("run code that comes with the model or tokenizer", default=False)
    tensor_parallel_size: int = option(
        "devices that each hold a share of the model, each with a process of its own",
        default=1,
        validator=within(1),
    )
    distributed_executor_backend: str | None = option(
        "what runs the other devices' processes; mp, and none: the engine itself, on this machine; ray: "
        "specdec-fleet, on several",
        default=None,
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float", "half"] = option(
        "dtype of weights and KV; auto: the checkpoint's, and float32 for float16 on a CPU", default="auto"
    )
    quantization: Literal["int8", "gguf", "awq", "compressed-tensors", "fp8", "gptq"] | None = option(
        "on a CPU, int8: weights of linear layers as int8 with a scale each output, in bfloat16; gguf: the "
        "blocks of a GGUF file as they are; none: as the checkpoint has them, quantized or not; the others: "
        "the same, and the checkpoint must be stored so",
        default=None,
    )
    exact: bool | None = option(
        "bits of a token that do not depend on what is computed beside it, so that output with and without "
        "speculation is identical in every dtype; none: where the kernels can do it",
        default=None,
    )
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3"] = option(
        "dtype of the target's KV cache; auto: the model's; fp8, which is fp8_e4m3: float8_e4m3fn at scale 1",
        default="auto",
    )
    revision: str | None = option("revision of the model on the hub", default=None)
    seed: int = option("seeds requests that bring no seed", default=0)
    gpu_memory_utilization: float = option(
        "fraction of the GPU's memory to use, weights included", default=0.9, validator=_fraction
    )
    enforce_eager: bool = option("launch a GPU's kernels one by one, without captured graphs", default=False)
    attention_backend: Literal["auto", "native", "flashinfer"] = option(
        "kernels of attention: our own, or on a GPU FlashInfer's if it is installed; with those steps are "
        "neither captured nor exact",
        default="auto",
    )
    max_model_len: int | None = option(
        "longest sequence, prompt included; none: the model's, or what the KV cache holds",
        default=None,
        validator=within(2),
    )
    max_num_seqs: int = option("most requests in a step", default=64, validator=within(1))
    max_num_batched_tokens: int | None = option(
        "most tokens in a step, drafts included; none: 2048, or what max_num_seqs needs",
        default=None,
        validator=within(1),
    )
    block_size: int = option("tokens in a KV block", default=16, validator=within(1, 1024))
    enable_prefix_caching: bool = option("re-use the KV of equal prefixes", default=True)
    enable_chunked_prefill: bool = option(
        "compute long prompts in chunks beside other requests", default=True
    )
    num_gpu_blocks_override: int | None = option(
        "KV blocks; none: as many as memory allows", default=None, validator=within(1)
    )
    load_format: Literal["auto", "dummy", "safetensors", "gguf"] = option(
        "where weights come from; dummy: random ones", default="auto"
    )
    device: str = option('torch device; auto: "cuda" if there is one', default="auto")
    scheduling_policy: Literal["fcfs", "priority"] = option(
        "who is served first, and preempted last: who came first, or who has the lower priority",
        default="fcfs",
    )
    async_scheduling: bool | None = option(
        "let the host launch a step before it has read the one before; none: on a GPU", default=None
    )
    max_admission_delay: float = option(
        "most seconds that a request waits for others to come in with it, where each time holds up captured "
        "steps and others come often enough; 0: none",
        default=0.05,
        validator=within(0),
    )
    structured_outputs_config: StructuredOutputsConfig = option(
        "defaults of structured outputs: a mapping or a StructuredOutputsConfig",
        default=StructuredOutputsConfig(),
    )
    shadow_rate: float = option(
        "share of the finished completions that is decoded again without speculation and compared, 0 to 1; "
        "see docs/exactness.md",
        default=0.0,
        validator=_share,
    )
    enable_lora: bool = option("let requests ask for adapters; see docs/adapters.md", default=False)
    max_loras: int = option(
        "adapters that the requests of a step may have, each in memory beside the model",
        default=1,
        validator=within(1),
    )
    max_lora_rank: int = option("highest rank of an adapter", default=16, validator=within(1, 512))
    max_cpu_loras: int | None = option(
        "adapters whose weights are kept on the host; none: max_loras", default=None, validator=within(1)
    )
    limit_mm_per_prompt: dict[str, int] | None = option(
        "most images of a prompt, as {'image': 2}; 0: text only, without vision tower; none: all that fit",
        default=None,
        validator=_limits,
    )
    allowed_local_media_path: str | None = option(
        "directory whose images conversations may name by file: URLs; none: no file is read", default=None
    )
    allowed_media_domains: tuple[str, ...] = option(
        "hosts from which images that conversations name are fetched; empty: none", default=()
    )
    disable_plugins: tuple[str, ...] = option("plugin families not to load", default=())
    speculative_config: Any = option(
        "how to speculate: a mapping, a JSON string or a SpeculativeConfig; none: not at all", default=None
    )

    def __attrs_post_init__(self) -> None:
        if self.shadow_rate and self.speculative_config is None:
            raise ValueError(
                f"shadow_rate={self.shadow_rate} has no effect without speculation, which it checks: give a "
                "speculative_config, or leave it out"
            )
        self._check_adapters()
        budget = self.max_num_batched_tokens
        if budget is not None and budget < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens={budget} must be at least max_num_seqs={self.max_num_seqs}, "
                "so that each request gets a token a step; raise the one or lower the other"
            )

    def _check_adapters(self) -> None:
        bounds = {"max_loras": 1, "max_lora_rank": 16, "max_cpu_loras": None}
        if not self.enable_lora:
            for name, default in bounds.items():
                if (value := getattr(self, name)) != default:
                    raise ValueError(
                        f"{name}={value} has no effect without enable_lora=True: set it, or leave it out"
                    )
        elif self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ValueError(
                f"max_cpu_loras={self.max_cpu_loras} must be at least max_loras={self.max_loras}: what is on "
                "the device is kept on the host too"
            )

    @property
    def token_budget(self) -> int:
        """Most tokens in a step."""
        return self.max_num_batched_tokens or max(2048, self.max_num_seqs)


class EngineArgs(EngineFields):
    """Arguments of :class:`~specdecode.LLM` and :class:`~specdecode.LLMEngine`, by vLLM's names.

    ``docs/keywords.md`` lists them all: those that work (:class:`EngineFields`), those without meaning
    here, which are warned about once, and those that are refused. None asks for the default.

    Raises:
        ConfigError: every unknown or wrong one, each with the remedy.
    """

    def __init__(self, model: str | None = None, **keywords: Any) -> None:
        self._set(_checked({"model": model, **keywords}, "EngineArgs"))

    @classmethod
    def of(cls, keywords: Mapping[str, Any]) -> EngineArgs:
        """From keywords as a user gives them to :class:`~specdecode.LLM`.

        Raises:
            ConfigError: every unknown or wrong one, each with the remedy.
        """
        args = cls.__new__(cls)
        args._set(_checked(keywords, "LLM"))
        return args

    def _set(self, fields: EngineFields) -> None:
        super().__init__(**attrs.asdict(fields, recurse=False))


def _checked(keywords: Mapping[str, Any], owner: str) -> EngineFields:
    """``keywords`` as fields; ``owner``: what messages call them."""
    known, faults = drop_foreign(keywords)
    try:
        known = modernise(known)
    except ConfigError as error:
        faults += error.faults
        known = {name: value for name, value in known.items() if name not in {ROOT, *FLAT, *OLD}}
    known = {name: value for name, value in known.items() if value is not None or name not in _FIELDS}
    if isinstance(known.get("disable_plugins"), str):
        faults.append(f"disable_plugins must be a list of names, got {known.pop('disable_plugins')!r}")
    if "model" in known:
        known["model"] = str(known["model"])
    if type(dtype := known.get("dtype")).__name__ == "dtype":  # torch's own, which is not imported here
        known["dtype"] = str(dtype).removeprefix("torch.")
    try:
        fields = structure(EngineFields, known, owner, neighbours=(*FLAT, *OLD, *foreign_keywords()))
    except ConfigError as error:
        raise ConfigError(*faults, *error.faults) from None
    if faults:
        raise ConfigError(*faults)
    return fields


_FIELDS = frozenset(attribute.name for attribute in attrs.fields(EngineFields))
