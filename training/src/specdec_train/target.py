"""The frozen target: what recipes are given of it, and the engine over it."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import torch
from specdecode import models
from specdecode.contract import TargetInfo, Unsupported
from specdecode.models.weights import stored_tensors

from .options import DataOptions
from .recipe import TrainingTarget

#: Tokens of a KV block, as engines have it unless told otherwise.
_BLOCK = 16
#: Share of a GPU's memory for the engines that write answers.
_MEMORY = 0.85
_EMBED, _NORM, _HEAD = "embed_tokens.weight", "norm.weight", "lm_head.weight"


@attrs.frozen(kw_only=True)
class EngineMaker:
    """Makes engines over a target; it can be sent to another process."""

    model: str
    dtype: str
    device: str
    keywords: dict[str, Any]

    def __call__(self, **more: Any) -> Any:
        """An engine with the maker's keywords and ``more``."""
        from specdecode import LLM

        return LLM(self.model, **{"dtype": self.dtype, "device": self.device, **self.keywords, **more})


@attrs.frozen(kw_only=True, eq=False)
class Target:
    """A target before its weights are read."""

    model: str
    files: models.ModelFiles
    info: TargetInfo
    device: torch.device
    dtype: torch.dtype

    @classmethod
    def resolve(cls, model: str, *, dtype: str = "auto", device: str = "auto") -> Target:
        """``dtype`` "auto" is bfloat16 on a GPU, and the checkpoint's elsewhere.

        Raises:
            ConfigError: there is no such model or device.
            Unsupported: it is none of the native decoder's.
        """
        files = models.resolve_model(model)
        if not models.is_native(files):
            raise Unsupported(
                f"--model {model}: training wants a model of the native decoder "
                f"({', '.join(sorted(models.FAMILIES))}), this is {files.architecture}"
            )
        place = models.resolve_device(device)
        if dtype == "auto" and place.type == "cuda":  # answers, states and products: none wants float32
            dtype = "bfloat16"
        chosen = models.resolve_dtype(dtype, files.hf_config, place)
        longest = models.resolve_max_model_len(None, files.hf_config)
        info = models.describe_target(files, dtype=chosen, device=place, max_model_len=longest)
        return cls(model=model, files=files, info=info, device=place, dtype=chosen)

    def engine(self, **keywords: Any) -> Any:
        """An engine over it, in its dtype, on its device."""
        return self.engines(**keywords)()

    def writer(self, data: DataOptions) -> EngineMaker:
        """Makes engines that write answers."""
        longest = data.prompt_tokens + data.user_tokens + data.answer_tokens
        length = min(self.info.max_model_len, longest)
        keywords: dict[str, Any] = {"max_num_seqs": data.batch_size, "max_model_len": length}
        if data.writers > 1 and self.device.type == "cuda":
            # Each plans by the memory it finds taken, and several begin at once: what they need is said.
            rows = data.batch_size * -(-length // _BLOCK)
            keywords |= {"num_gpu_blocks_override": rows + rows // 16 + 1, "gpu_memory_utilization": _MEMORY}
        return self.engines(**keywords)

    def engines(self, **keywords: Any) -> EngineMaker:
        """Makes engines with these keywords and further ones."""
        return EngineMaker(
            model=self.model,
            dtype=str(self.dtype).removeprefix("torch."),
            device=str(self.device),
            keywords=keywords,
        )

    def decoder(self) -> models.Decoder:
        """Its layers and weights, on the device, outside of any engine."""
        longest = self.info.max_model_len
        model = models.load_model(self.files, dtype=self.dtype, device=self.device, max_model_len=longest)
        assert isinstance(model, models.Decoder)  # as resolve() made sure
        return model

    def for_training(self, counts: np.ndarray) -> TrainingTarget:
        """Its embeddings, output layer and final norm, on the device."""
        found: dict[str, torch.Tensor] = {}
        for stored in stored_tensors(self.files.path):
            if (name := stored.name.removeprefix("model.")) in (_EMBED, _NORM, _HEAD):
                found[name] = stored.map()
        embed = found[_EMBED].to(self.device, self.dtype)
        config = models.decoder_config(self.files.hf_config, self.files.architecture)
        tied = config.tie_word_embeddings or _HEAD not in found
        return TrainingTarget(
            info=self.info,
            device=self.device,
            dtype=self.dtype,
            embed=embed,
            lm_head=embed if tied else found[_HEAD].to(self.device, self.dtype),
            norm=found[_NORM].to(self.device, torch.float32),
            rms_norm_eps=config.rms_norm_eps,
            counts=torch.from_numpy(counts),
            load_weights=lambda: models.load_weights(self.files.path),
        )
