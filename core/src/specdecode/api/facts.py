"""What an engine is, told once it is made: what a server says of it, wherever the engine runs."""

from __future__ import annotations

import attrs

from .engine import LLMEngine
from .media import MediaPolicy
from .memory import MemoryPlan


@attrs.frozen(kw_only=True)
class EngineFacts:
    """Does not change while the engine lives, and can be sent to another process."""

    model: str  #: as it was given
    method: str | None  #: how it drafts; None: not at all
    num_speculative_tokens: int  #: deepest draft; 0 without speculation
    max_model_len: int
    vocab_size: int
    dtype: str
    device: str
    seed: int  #: seeds requests that bring no seed
    memory: MemoryPlan
    media: MediaPolicy | None = None  #: which images it takes; None: text only

    @classmethod
    def of(cls, engine: LLMEngine) -> EngineFacts:
        drafting, target = engine.core.drafting, engine.target
        return cls(
            model=engine.args.model,
            method=engine.method,
            num_speculative_tokens=drafting.needs.depth if drafting else 0,
            max_model_len=target.max_model_len,
            vocab_size=target.vocab_size,
            dtype=target.dtype,
            device=target.device,
            seed=engine.args.seed,
            memory=engine.memory,
            media=engine.media,
        )
