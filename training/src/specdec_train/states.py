"""The target's hidden states of texts, given by the engine to a proposer that drafts nothing.

They are taken in a pass of their own over prompt and answer, not while answers are written: a prompt is
computed at the rate of matrix products, thousands of tokens a step, and the steps that write answers stay
what they are, captured graphs over seats, in which nobody may ask whose row is whose.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from specdecode import SamplingParams
from specdecode.contract import (
    ConfigError,
    Drafts,
    Needs,
    Place,
    Proposer,
    ProposerSpec,
    RequestInfo,
    SpecdecodeError,
    StepView,
    Tap,
)
from specdecode.plugins import default_manager, hookimpl

from .recipe import Boundary
from .texts import Texts, TextStore, with_replacement

#: Name of the method while states are taken.
COLLECT = "collect-states"
_BATCHED_TOKENS = 8192
#: Share of a GPU's memory for the engine that computes them.
_MEMORY = 0.5
#: Share of a GPU's free memory that states may fill while they are trained on.
_RESIDENT = 0.6


@attrs.frozen(kw_only=True)
class CollectConfig:
    """No keys."""


class Collector(Proposer):
    """Puts the target's states of each request's tokens into rows that were set aside for them.

    Attributes:
        states: for each tap ``[N + 1, H]``; the last row is for what nobody wants.
        seen: ``[N + 1]`` bool.
    """

    def __init__(self, taps: Sequence[Tap]) -> None:
        self._taps = taps
        self.states: list[torch.Tensor] = []

    def expect(self, texts: Texts, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        """Set rows aside for ``texts``; a request is known for one of them by its prompt."""
        self._awaited: dict[bytes, list[int]] = {}
        for index, start in enumerate(texts.starts[:-1].tolist()):
            self._awaited.setdefault(_key(texts.document(index)), []).append(start)
        self._starts: dict[str, int] = {}
        tokens = len(texts.ids)
        self.states = [torch.empty(tokens + 1, hidden, dtype=dtype, device=device) for _ in self._taps]
        self.seen = torch.zeros(tokens + 1, dtype=torch.bool, device=device)

    def on_add(self, request: RequestInfo) -> None:
        if self.states and not request.resumed:
            key = _key(np.fromiter(request.token_ids, np.int32, request.prompt_len))
            self._starts[request.id] = self._awaited[key].pop()

    def propose(self, step: StepView, out: Drafts) -> None:
        if not self.states:
            return
        nowhere = self.seen.shape[0] - 1
        starts = torch.tensor([self._starts[id] for id in step.request_ids], device=self.seen.device)
        positions = step.positions
        places = torch.where(positions > 0, starts[step.rows] + positions - 1, nowhere)
        for states, tap in zip(self.states, step.taps, strict=True):
            states[places] = tap.to(states.dtype)
        self.seen[places] = True


def _key(ids: np.ndarray) -> bytes:
    return ids.astype(np.int32).tobytes()


def boundary_folder(folder: Path, boundary: Boundary) -> Path:
    return folder / f"states-{boundary}"


def state_file(folder: Path, boundary: Boundary, shard: int) -> Path:
    return boundary_folder(folder, boundary) / f"{shard:05}.safetensors"


def make_states(
    llm_of: Callable[..., Any],
    store: TextStore,
    boundaries: Sequence[Boundary],
    *,
    advance: Callable[[int, str], None] = lambda tokens, rate: None,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Write the states of all of ``store``'s texts at ``boundaries``, but for those that are there.

    Args:
        llm_of: makes an engine with further keywords.
        advance: told the tokens so far, and the rate.
    """
    folder = store.folder
    shards = store.load()
    missing = [
        boundary
        for boundary in boundaries
        if any(not state_file(folder, boundary, shard).is_file() for shard in range(len(shards)))
    ]
    if not missing:
        return
    taps = [Tap(boundary) for boundary in missing]
    collector = Collector(taps)
    longest = max(int((part.starts[1:] - part.starts[:-1]).max()) for part in shards)
    began, tokens = clock(), 0
    with (
        _registered(collector, taps),
        llm_of(
            speculative_config={"method": COLLECT},
            enforce_eager=True,  # prompts alone: there is no step to capture
            async_scheduling=False,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            gpu_memory_utilization=_MEMORY,  # beside the states of a shard
            max_num_seqs=min(256, max(map(len, shards))),
            max_num_batched_tokens=max(_BATCHED_TOKENS, longest + 1),
            max_model_len=longest + 2,
        ) as llm,
    ):
        target = llm.llm_engine.target
        to_come = sum(
            len(texts.ids)
            for shard, texts in enumerate(shards)
            for boundary in missing
            if not state_file(folder, boundary, shard).is_file()
        )
        _check_room(folder, to_come * target.hidden_size * getattr(torch, target.dtype).itemsize)
        for shard, texts in enumerate(shards):
            tokens += len(texts.ids)
            if all(state_file(folder, boundary, shard).is_file() for boundary in missing):
                continue
            _collect(llm, collector, texts)
            for boundary, states in zip(missing, collector.states, strict=True):
                save_states(state_file(folder, boundary, shard), states[:-1])
            advance(tokens, f"{tokens / (clock() - began):,.0f} tokens/s")


def _check_room(folder: Path, wanted: int) -> None:
    """Raise ConfigError if so many bytes do not fit beside ``folder``'s texts."""
    free = shutil.disk_usage(folder).free
    if wanted > free:
        raise ConfigError(
            f"--work: the target's states of the texts take {wanted / 2**30:.1f} GiB, and {folder} has "
            f"{free / 2**30:.1f} GiB left: give another directory, ask for fewer --data-tokens, or compute "
            "them with each batch (--fresh-states)"
        )


def fit(num_bytes: int, device: torch.device) -> bool:
    """Whether states of that size may stay in the memory of ``device``; on a CPU they never do."""
    return device.type == "cuda" and num_bytes < _RESIDENT * torch.cuda.mem_get_info(device)[0]


def save_states(file: Path, states: torch.Tensor) -> None:
    """``[N, H]``, in the dtype they are in."""
    from safetensors.torch import save_file

    held = {"states": states.cpu().contiguous()}
    with_replacement(file, lambda path: save_file(held, path))


def _collect(llm: Any, collector: Collector, texts: Texts) -> None:
    """Run every document as a prompt of which one more token is drawn."""
    engine = llm.llm_engine
    target = engine.target
    collector.expect(texts, target.hidden_size, getattr(torch, target.dtype), torch.device(target.device))
    params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False, ignore_eos=True)
    for index in range(len(texts)):
        engine.add_request(f"text-{index}", {"prompt_token_ids": texts.document(index).tolist()}, params)
    while engine.has_unfinished_requests():
        engine.step()
    if not bool(collector.seen[:-1].all()):
        raise SpecdecodeError(
            f"the engine gave the states of {int(collector.seen[:-1].sum())} of {len(texts.ids)} tokens; "
            "see the log for what failed"
        )


class _registered:
    """The collector as a method, while it is wanted."""

    def __init__(self, collector: Collector, taps: Sequence[Tap]) -> None:
        spec = ProposerSpec(
            name=COLLECT,
            summary="keeps the target's hidden states and drafts nothing",
            api=1,
            config=CollectConfig,
            needs=lambda config, context: Needs(width=1, depth=1, place=Place.DEVICE, taps=tuple(taps)),
            build=lambda config, context: collector,
        )

        class Plugin:
            @hookimpl
            def specdecode_proposers(self) -> list[ProposerSpec]:
                return [spec]

        self._plugin = Plugin()

    def __enter__(self) -> None:
        default_manager().register(self._plugin, COLLECT)

    def __exit__(self, *_: Any) -> None:
        default_manager().unregister(COLLECT)
