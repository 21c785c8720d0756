"""Device time of single steps: the engine's own, and the target's for any number of tokens a row.

Both are the step over seats that the overlapped loop replays: inputs prepared, the target run, tokens drawn,
drafts accepted. No host takes part in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from engines import looping_prompts
from specdecode import LLM
from specdecode.runner.graphs import Graphs
from specdecode.runner.seats import Seats, SeatShape
from specdecode.runner.steady import SteadyOutput, SteadyStep
from timing import captured, device_ms

TOKENS = (1, 2, 4, 6, 8, 16, 32, 64)
#: Most tokens of a measured step, all rows together.
MOST_TOKENS = 2048


class Seated:
    """Rows in seats, as they are behind a prompt of ``context`` tokens, with all the drafts there can be."""

    def __init__(self, llm: LLM, seats: Seats, rows: int, context: int) -> None:
        size, width = seats.shape.block_size, seats.shape.width
        self._seats, self._rows, self._context = seats, rows, context
        columns = -(-(context + 2 * (width + 1)) // size)
        if rows * columns > llm.llm_engine.memory.num_blocks:
            raise ValueError(f"{rows} rows of {context} tokens want {rows * columns} KV blocks")
        for column, value in (
            (seats.limit, context + width + 2),
            (seats.budget, width),
            (seats.temperature, 0),
            (seats.top_p, 1),
        ):
            column[:rows] = value
        blocks = 1 + torch.randperm(rows * columns, device=seats.device)
        seats.table[:rows, :columns] = blocks.view(rows, columns)
        prompts = looping_prompts(rows, context, seats.shape.vocab_size, 1)
        texts = torch.tensor([prompt["prompt_token_ids"] for prompt in prompts], device=seats.device)
        seats.last[:rows] = texts[:, -1]
        if seats.history is not None:
            seats.history[:rows, :context] = texts
        self.reset()

    def reset(self) -> None:
        """Undo what a step moved, so that the next one is the same."""
        seats, rows = self._seats, slice(self._rows)
        seats.committed[rows] = self._context
        seats.active[rows] = 1
        seats.drafts.lens[rows] = seats.shape.width

    def stand_up(self) -> None:
        """Leave the seats empty."""
        seats, rows = self._seats, slice(self._rows)
        seats.active[rows] = 0
        seats.committed[rows] = 1
        seats.table[rows] = 0


def engine_step_ms(llm: LLM, rows: int, context: int) -> float | None:
    """The engine's own captured step of ``rows`` rows, drafting included; None if it replays none.

    The engine must be idle.
    """
    steady = getattr(llm.llm_engine.core, "steady", None)
    if steady is None or not steady.captured:
        return None
    with torch.inference_mode():
        seated = Seated(llm, steady.seats, rows, context)
        tokens = steady.seats.shape.width + 1
        try:
            return device_ms(lambda: steady.run(rows, tokens, None), before=seated.reset)
        finally:
            seated.stand_up()


@torch.inference_mode()
def target_step_ms(llm: LLM, rows: int, tokens: int, context: int) -> tuple[float, float]:
    """The forward with its output layer, and the whole step that verifies ``tokens - 1`` drafts a row."""
    engine = llm.llm_engine
    runner, size = engine.core.runner, engine.args.block_size
    shape = SeatShape(
        rows=rows,
        width=tokens - 1,
        depth=tokens - 1,
        tree=False,
        columns=-(-(engine.target.max_model_len + tokens) // size) + 1,
        block_size=size,
        vocab_size=engine.target.vocab_size,
        history=0,
    )
    seats = Seats(shape, runner.device)
    steady = SteadyStep(runner, seats, Graphs(runner.device, enabled=False))
    seated = Seated(llm, seats, rows, context)
    output: SteadyOutput = steady.run(rows, tokens, None)
    inputs = output.inputs

    def forward() -> torch.Tensor:
        meta = steady._metadata(inputs, rows, tokens)  # the engine's own, whatever it holds
        hidden, _ = runner.target(inputs.ids.flatten(), meta)
        return runner.model.logits(hidden)

    whole = device_ms(captured(lambda: steady.run(rows, tokens, None)), before=seated.reset)
    return device_ms(captured(forward)), whole


def cost_curve(
    llm: LLM,
    batches: Sequence[int],
    context: int,
    left: Callable[[], float],
    lengths: Sequence[int] = TOKENS,
) -> list[dict[str, Any]]:
    """A row for each batch and number of tokens a row: milliseconds of the forward and of the whole step.

    ``left``: seconds of budget; the curve ends where they do.
    """
    for key, value in llm.llm_engine.core.runner.store.target:
        key.normal_()  # zeros would be kinder to the card
        value.normal_()
    found: list[dict[str, Any]] = []
    for tokens in lengths:
        for batch in batches:
            if batch * tokens > MOST_TOKENS or left() < 5:
                continue
            forward, whole = target_step_ms(llm, batch, tokens, context)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()  # a graph's memory is a pool of its own
            found.append(
                {
                    "batch": batch,
                    "tokens": tokens,
                    "forward_ms": forward,
                    "step_ms": whole,
                    "deciding": 1 - forward / whole,
                }
            )
    for row in found:
        one = next(other for other in found if other["batch"] == row["batch"])
        row["to_one"] = row["step_ms"] / one["step_ms"]
    return found
