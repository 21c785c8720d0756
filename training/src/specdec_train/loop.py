"""The training loop: AdamW over float32 weights, warm-up and cosine, saved often enough to be killed."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch
from specdecode.contract import SpecdecodeError

from .corpus import Batches
from .evaluation import Acceptance, HeldOut
from .options import LoopOptions
from .recipe import Trainee
from .texts import with_replacement

#: Steps between looks at the loss and the clock; the device is not waited for in between.
_LOOK = 20


@attrs.frozen(kw_only=True)
class Point:
    """One line of the loss curve."""

    step: int
    seconds: float
    loss: float
    terms: dict[str, float]
    acceptance: Acceptance | None = None


@attrs.define(kw_only=True)
class Progress:
    """How far a run is: what is saved beside weights and optimizer."""

    step: int = 0
    seconds: float = 0.0
    tokens: int = 0
    curve: list[Point] = attrs.field(factory=list)


class Training:
    """One module being trained; ``file`` holds its state between runs.

    With ``steps`` alone the result depends on the seed only, however often the run was stopped. ``minutes``
    bound the time that all its parts took together; the learning rate follows whichever limit is nearer.

    Weights are float32; products are in bfloat16 unless the target computes in float32.
    """

    def __init__(
        self,
        module: Any,
        batches: Batches,
        held_out: HeldOut,
        options: LoopOptions,
        *,
        learning_rate: float,
        device: torch.device,
        dtype: torch.dtype,
        file: Path,
        tell: Callable[[Progress, Point], None] = lambda progress, point: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._module, self._batches, self._held_out, self._options = module, batches, held_out, options
        self._rate, self._device, self._dtype, self._file = learning_rate, device, dtype, file
        self._tell, self._clock = tell, clock
        weights = [p for p in module.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in weights if p.ndim > 1], "weight_decay": options.weight_decay},
                {"params": [p for p in weights if p.ndim <= 1], "weight_decay": 0.0},
            ],
            lr=learning_rate,
            betas=(0.9, 0.95),
            fused=device.type == "cuda",
        )
        self._weights = weights
        self.progress = Progress()
        if file.is_file():
            self._load()

    @property
    def autocast(self) -> Any:
        if self._dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, dtype=torch.bfloat16)

    def run(self) -> Progress:
        """Train until a limit is met; where it is met already, nothing happens."""
        progress, options = self.progress, self._options
        module: Trainee = self._module
        self._module.train()
        began = self._clock() - progress.seconds
        saved = self._clock()
        losses: list[torch.Tensor] = []
        terms: list[dict[str, torch.Tensor]] = []
        while not self._over():
            rate = self._rate * self._schedule()
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            batch = self._batches.batch(progress.step)
            with self.autocast:
                loss, details = module.loss(batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self._weights, options.max_grad_norm)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
            progress.step += 1
            progress.tokens += batch.ids.numel()
            losses.append(loss.detach())
            terms.append({name: value.detach() for name, value in details.items()})
            evaluate = progress.step % options.evaluate_every == 0
            if evaluate or progress.step % _LOOK == 0 or progress.step == options.steps:
                mean = float(torch.stack(losses).mean())
                if not math.isfinite(mean):
                    raise SpecdecodeError(
                        f"the loss is {mean} at step {progress.step}: lower --learning-rate and start afresh"
                    )
                shown = {name: float(torch.stack([t[name] for t in terms]).mean()) for name in details}
                progress.seconds = self._clock() - began
                point = Point(
                    step=progress.step,
                    seconds=progress.seconds,
                    loss=mean,
                    terms=shown,
                    acceptance=self.evaluate() if evaluate else None,
                )
                losses, terms = [], []
                if evaluate or not progress.curve or progress.step == options.steps:
                    progress.curve.append(point)
                self._tell(progress, point)
                if self._clock() - saved > 60 * options.save_minutes:
                    self.save()
                    saved = self._clock()
        self.save()
        return progress

    def evaluate(self) -> Acceptance:
        """Held-out acceptance of the weights as they are."""
        self._module.eval()
        try:
            return self._held_out.evaluate(self._module, self.autocast)
        finally:
            self._module.train()

    # -- how far --------------------------------------------------------------------------------
    def _done(self) -> float:
        """0 to 1: the share of the nearer limit."""
        shares = [0.0]
        if self._options.steps is not None:
            shares.append(self.progress.step / self._options.steps)
        if self._options.minutes is not None:
            shares.append(self.progress.seconds / (60 * self._options.minutes))
        return max(shares)

    def _over(self) -> bool:
        return self._done() >= 1

    def _schedule(self) -> float:
        """Factor of the learning rate: a linear rise, then a cosine to a hundredth."""
        done, warmup = self._done(), self._options.warmup
        if self._options.minutes is not None and self.progress.step < _LOOK:
            return (self.progress.step + 1) / _LOOK  # the clock is not looked at yet
        if done < warmup:
            return max(done / warmup, 1e-3)
        return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (done - warmup) / (1 - warmup)))

    # -- state ----------------------------------------------------------------------------------
    def save(self) -> None:
        state = {
            "module": self._module.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "progress": attrs.asdict(self.progress),
        }
        with_replacement(self._file, lambda path: torch.save(state, path))

    def _load(self) -> None:
        state = torch.load(self._file, map_location=self._device, weights_only=True)
        self._module.load_state_dict(state["module"])
        self._optimizer.load_state_dict(state["optimizer"])
        held = state["progress"]
        curve = [
            Point(**{**point, "acceptance": point["acceptance"] and Acceptance(**point["acceptance"])})
            for point in held["curve"]
        ]
        self.progress = Progress(**{**held, "curve": curve})
