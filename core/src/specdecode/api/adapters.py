"""What an engine with room for adapters has beside the others."""

from __future__ import annotations

from typing import Any

from .. import models
from ..contract import Unsupported
from ..engine.metrics import Gauge
from ..engine.request import Request
from ..engine.scheduler import Scheduler
from ..lora.manager import LoRALimits, LoRAManager
from ..models import Decoder
from .args import EngineArgs


def check_adapters(args: EngineArgs, files: models.ModelFiles) -> None:
    """Refuse what has no place for adapters, before any weight is read.

    Raises:
        Unsupported: names the model and what would work.
    """
    if args.enable_lora and not models.is_native(files):
        raise Unsupported(
            f"enable_lora=True works with the native decoder, and {files.architecture} runs as a model of "
            "transformers: merge the adapter into a checkpoint (merge_and_unload of PEFT) and serve that"
        )


def room_for_adapters(args: EngineArgs, model: Any, *, exact: bool) -> LoRAManager | None:
    """Give the layers of ``model`` slots for adapters, if there are to be any.

    ``exact``: a token's bits do not depend on those beside it.
    """
    if not args.enable_lora:
        return None
    assert isinstance(model, Decoder)  # `check_adapters` saw to it
    limits = LoRALimits(
        max_loras=args.max_loras,
        max_cpu_loras=args.max_cpu_loras or args.max_loras,
        max_rank=args.max_lora_rank,
    )
    return LoRAManager(model, limits, exact=exact)


def adapters_in_use(scheduler: Scheduler) -> Gauge:
    """Which adapters run and wait, as vLLM tells it: in labels."""

    def names(requests: list[Request]) -> str:
        found = {request.adapter.name for request in requests if request.adapter is not None}
        return ",".join(sorted(found))

    assert scheduler.adapters is not None
    labels = {
        "max_lora": str(scheduler.adapters.num_slots),
        "running_lora_adapters": names(scheduler.running),
        "waiting_lora_adapters": names([*scheduler.waiting]),
    }
    return Gauge(name="vllm:lora_requests_info", labels=labels, reading=1.0)
