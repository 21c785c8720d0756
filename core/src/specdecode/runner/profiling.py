"""What a step takes of a GPU's memory beside weights and KV: measured on the model itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import attrs
import torch
from specdec_kernels.attention import AttentionMetadata

from ..api.params import SamplingParams
from ..contract import Needs
from ..engine.pacing import MeasuredCurve
from ..kv.store import LayerCache, LayerShape
from ..models import Decoder, TransformersDecoder
from ..sampling import SampleRow, SamplingBatch, draw
from .adapting import adapted, first_adapter
from .graphs import Graphs
from .rehearsal import distinct_tokens, own_blocks
from .runner import ModelRunner

#: Tokens before those whose step is timed.
_CONTEXT = 256
#: A request that wants all filters and noise: what the sampler takes most memory for.
_HUNGRY = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, min_p=0.01)


@attrs.frozen
class StepMemory:
    """Peak bytes of steps, beyond what is there before and after them."""

    largest: int = 0  #: the most a step takes, tapped states aside
    taps: int = 0  #: tapped states of the largest step
    decode: int = 0  #: a step that verifies drafts of as many rows as there may be


def measure_steps(
    model: Decoder | TransformersDecoder,
    layers: Sequence[LayerShape],
    needs: Needs | None,
    *,
    block_size: int,
    max_tokens: int,
    max_rows: int,
    max_len: int,
) -> StepMemory:
    """Run the largest steps and watch the allocator; nothing on a CPU. It compiles their kernels too.

    Args:
        layers: of the target's KV.
        needs: of the proposer, whose taps are held until it has drafted. Its own steps are not run: what
            they take is its ``scratch_bytes``.
        max_tokens, max_rows, max_len: most tokens and rows in a step, and tokens in a row.

    Raises:
        torch.cuda.OutOfMemoryError: such a step does not fit.
    """
    if model.device.type != "cuda":
        return StepMemory()
    prompts, decode = largest_steps(
        model, layers, needs, block_size=block_size, max_tokens=max_tokens, max_rows=max_rows, max_len=max_len
    )
    with_prompts, with_drafts = _peak(prompts, model.device), _peak(decode, model.device)
    width, taps = model.config.hidden_size, len(_boundaries(needs))
    tap_bytes = taps * max_tokens * width * model.dtype.itemsize
    largest = max(0, max(with_prompts, with_drafts) - tap_bytes)
    return StepMemory(largest, tap_bytes, with_drafts)


def largest_steps(
    model: Decoder | TransformersDecoder,
    layers: Sequence[LayerShape],
    needs: Needs | None,
    *,
    block_size: int,
    max_tokens: int,
    max_rows: int,
    max_len: int,
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Two steps on a KV cache of the null block alone: as many prompt tokens, and drafts, as there may be.

    What they compute is worthless. Tokens of both are drawn by every filter.
    """
    boundaries = _boundaries(needs)
    draws = 1 + (needs.width if needs else 0)
    caches = _null_caches(layers, block_size, model.device)

    @torch.inference_mode()
    def step(lengths: Sequence[int]) -> None:
        meta = _metadata(lengths, block_size, max_len, model.device)
        ids = torch.zeros_like(meta.rows)
        with adapted(model, first_adapter(model, ids)):
            hidden, _taps = model(
                ids, meta.positions, meta, caches, boundaries
            )  # held like a proposer's feed
        logits = model.compute_logits(hidden[: max_rows * draws])
        keys = [SampleRow(params=_HUNGRY, seed=0, index=0, position=1, num_output=0)] * len(logits)
        draw(logits, SamplingBatch.build(keys, logits.shape[1], logits.device))

    longest = min(max_tokens, max_len)
    prompts = [longest] * (max_tokens // longest)
    if max_tokens % longest:
        prompts.append(max_tokens % longest)
    return lambda: step(prompts[:max_rows]), lambda: step([draws] * max_rows)


@torch.inference_mode()
def target_costs(
    runner: ModelRunner, points: Sequence[tuple[int, int]], *, captured: bool = False, repeats: int = 2
) -> MeasuredCurve:
    """Time the target's step alone: its forward and its output layer, at a context of some hundred tokens.

    Args:
        points: ``(rows, tokens of a row)``.
        captured: as graphs, where steps are replayed.
        repeats: runs that a time is the mean of, beside one that warms up.
    """
    graphs = Graphs(runner.device, enabled=captured)
    found: dict[tuple[int, int], float] = {}
    for rows, tokens in points:
        step = _target_step(runner, rows, tokens)  # held: a graph reads what it holds
        run = graphs.capture(step, (rows, tokens))
        run()
        _wait(runner.device)
        started = time.perf_counter()
        for _ in range(repeats):
            run()
        _wait(runner.device)
        found[rows, tokens] = max((time.perf_counter() - started) / repeats, 1e-9)
    graphs.clear()
    return MeasuredCurve(found)


def can_be_captured(runner: ModelRunner, points: Iterable[tuple[int, int]]) -> bool:
    """Whether the target's step, its taps and its output layer can be: found by trying, with a line if not.

    Args:
        points: ``(rows, tokens of a row)`` to try.

    Raises:
        torch.cuda.OutOfMemoryError: there is no room to try.
    """
    graphs = Graphs(runner.device)
    with graphs.attempt(runner.model.code):
        for rows, tokens in points:
            graphs.capture(_target_step(runner, rows, tokens), (rows, tokens))
    found = graphs.enabled
    graphs.clear()
    return found


def _target_step(runner: ModelRunner, rows: int, tokens: int) -> Callable[[], object]:
    """A step over blocks that nobody holds: what it computes is worthless."""
    device, size = runner.device, runner.block_size
    slots = runner.max_slots or _CONTEXT + tokens
    positions = torch.arange(tokens, device=device) + min(_CONTEXT, max(0, slots - tokens - 1))
    positions = positions.repeat(rows)
    row = torch.arange(rows, device=device).repeat_interleave(tokens)
    table = own_blocks(rows, -(-slots // size), runner.num_blocks, device)
    meta = AttentionMetadata(
        rows=row,
        positions=positions,
        write_slots=table[row, positions // size] * size + positions % size,
        base=positions + 1,
        block_table=table,
        block_size=size,
        tokens_per_row=tokens,
        max_slots=runner.max_slots,
    )
    ids = distinct_tokens(rows * tokens, runner.model.config.vocab_size, device)
    adapters = first_adapter(runner.model, ids)

    def run() -> object:
        hidden, _ = runner.target(ids, meta, adapters)
        return runner.model.logits(hidden)

    return run


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _boundaries(needs: Needs | None) -> tuple[int, ...]:
    return tuple(tap.boundary for tap in needs.taps if isinstance(tap.boundary, int)) if needs else ()


def _null_caches(layers: Sequence[LayerShape], block_size: int, device: torch.device) -> list[LayerCache]:
    """One cache for all layers of a shape: nobody reads what was written."""
    made: dict[LayerShape, LayerCache] = {}
    for shape in layers:
        if shape not in made:
            made[shape] = (
                torch.zeros(1, block_size, shape.heads, shape.k_dim, dtype=shape.dtype, device=device),
                torch.zeros(1, block_size, shape.heads, shape.v_dim, dtype=shape.dtype, device=device),
            )
    return [made[shape] for shape in layers]


def _metadata(
    lengths: Sequence[int], block_size: int, max_len: int, device: torch.device
) -> AttentionMetadata:
    """Rows of ``lengths`` tokens each from position 0 on, in tables that could hold ``max_len``."""
    counts = torch.tensor(lengths)
    rows = torch.repeat_interleave(torch.arange(len(lengths)), counts)
    positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
    table = torch.zeros(len(lengths), -(-max_len // block_size), dtype=torch.int64, device=device)
    return AttentionMetadata(
        rows=rows.to(device),
        positions=positions,
        write_slots=torch.zeros_like(positions),
        base=positions + 1,
        block_table=table,
        block_size=block_size,
        lengths=tuple(lengths),
    )


def _peak(run: Callable[[], None], device: torch.device) -> int:
    """Bytes the allocator took from the device while ``run`` ran, gaps between tensors included."""
    run()  # compiles, and makes what stays
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    run()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_reserved(device)
    torch.cuda.empty_cache()
    return peak - before
