"""What the server needs of whatever generates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from ..api.facts import EngineFacts
from ..api.params import SamplingParams
from ..api.prompts import TokenizedPrompt
from ..api.streams import RequestStream
from ..api.updating import UpdateMode, WeightUpdate
from ..engine.metrics import Metric
from ..lora.request import LoRARequest

T = TypeVar("T")


class Backend(Protocol):
    """The part of :class:`~specdecode.AsyncLLM` that is served; its methods have the meaning they have there.

    One engine in this process, or many in others behind one door.
    """

    @property
    def facts(self) -> EngineFacts: ...

    # -- requests
    def get_tokenizer(self) -> Any: ...
    def get_default_sampling_params(self) -> SamplingParams: ...
    async def prepare(
        self, prompt: Any, params: SamplingParams, *, where: str = "prompt"
    ) -> TokenizedPrompt: ...
    async def at_the_door(self, function: Callable[[], T], *, long: bool = False) -> T: ...
    async def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> RequestStream: ...

    # -- operation
    async def check_health(self, stuck_after: float) -> None: ...
    async def get_metrics(self) -> Sequence[Metric]: ...
    async def reset_prefix_cache(self) -> bool: ...
    async def update_weights(self, source: str, *, mode: UpdateMode = "wait") -> WeightUpdate: ...
    async def sleep(self, level: int = 0) -> None: ...
    async def wake_up(self) -> None: ...
    async def is_sleeping(self) -> bool: ...
