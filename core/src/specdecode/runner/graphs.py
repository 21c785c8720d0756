"""CUDA graphs in one memory pool: a step recorded once a static shape, and replayed by one launch."""

from __future__ import annotations

import bisect
import contextlib
import gc
import logging
import time
import traceback
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import attrs
import torch

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

#: Runs before a capture: in the first kernels are compiled and workspaces made, the second finds them.
_WARM_UPS = 2
#: Row counts up to here are the powers of two; from here on there is one more between two of them.
_SPARSE = 16


def row_buckets(most: int) -> tuple[int, ...]:
    """Row counts that graphs are captured for, ascending: 1 2 4 8 16 24 32 48 64 96 128 ... ``most``.

    A step of ``n`` rows runs in the smallest bucket that holds it, so the steps grow with what a row of
    padding costs beside the weights, which every step reads.
    """
    counts: list[int] = []
    power = 1
    while power < most:
        counts.append(power)
        if power >= _SPARSE and power * 3 // 2 < most:
            counts.append(power * 3 // 2)
        power *= 2
    return (*counts, most)


def bucket_for(rows: int, buckets: Sequence[int]) -> int:
    """The smallest of the ascending ``buckets`` that holds ``rows``; ValueError if none does."""
    index = bisect.bisect_left(buckets, rows)
    if index == len(buckets):
        raise ValueError(f"{rows} rows fit none of the buckets {', '.join(map(str, buckets))}")
    return buckets[index]


@attrs.frozen(eq=False)
class Replay(Generic[Result]):
    """A captured function: calling it replays the graph and returns what the function returned then.

    The result lies at fixed addresses: the next replay overwrites it, and what else was allocated inside
    may be overwritten by any graph of the pool.
    """

    key: Hashable
    graph: torch.cuda.CUDAGraph
    result: Result
    num_bytes: int  #: of the device, for this graph beyond what the pool held before
    seconds: float  #: warm-up and capture

    def __call__(self) -> Result:
        self.graph.replay()
        return self.result


class Graphs:
    """Captures functions of static tensors; graphs share one memory pool, so only one runs at a time.

    Capture the largest first: the smaller ones then find their memory in the pool.

    Args:
        device: whose graphs.
        enabled: False: functions are run as they are (``enforce_eager``). So are they on a CPU.
    """

    def __init__(self, device: torch.device, *, enabled: bool = True) -> None:
        self.device = device
        self.enabled = enabled and device.type == "cuda"
        self.captured: dict[Hashable, Replay] = {}
        self._pool: Any = None  # its handle
        self._stream: torch.cuda.Stream | None = None
        if self.enabled:
            self._stream = torch.cuda.Stream(device)
            self._take_pool()

    @property
    def num_bytes(self) -> int:
        """Bytes of the device that all graphs take."""
        return sum(replay.num_bytes for replay in self.captured.values())

    @property
    def seconds(self) -> float:
        """Time that warming up and capturing took."""
        return sum(replay.seconds for replay in self.captured.values())

    def capture(self, fn: Callable[[], Result], key: Hashable) -> Callable[[], Result]:
        """What replays ``fn``, or ``fn`` itself where graphs are off.

        ``fn`` is run a few times, so the tensors it works on must hold inputs that do no harm. It reads and
        writes tensors that live as long as the graph, allocates others as it likes, and never looks at a
        value. The signature is that of ``capture`` in :meth:`specdecode.contract.Proposer.warm`.

        Args:
            key: names the graph, as a rule a :class:`~specdecode.contract.Bucket`; each once.

        Raises:
            ValueError: the key has a graph already.
            torch.cuda.OutOfMemoryError: the graph's memory is not to be had.
        """
        if not self.enabled:
            return fn
        if key in self.captured:
            raise ValueError(f"a graph of {key} was captured already")
        assert self._stream is not None
        started = time.perf_counter()
        with torch.inference_mode():
            self._warm_up(fn, self._stream)
            torch.cuda.empty_cache()  # what warming up left must not count as the graph's
            free = torch.cuda.mem_get_info(self.device)[0]
            graph = torch.cuda.CUDAGraph()
            with _no_collection(), torch.cuda.stream(self._stream):
                result = self._record(graph, fn)
        num_bytes = max(0, free - torch.cuda.mem_get_info(self.device)[0])
        replay = Replay(key, graph, result, num_bytes, time.perf_counter() - started)
        self.captured[key] = replay
        return replay

    @contextlib.contextmanager
    def attempt(self, whose: str) -> Iterator[None]:
        """Inside, captures may fail: graphs are off then, nothing is left of any, and the log says why.

        Want of memory is no such reason, and raises.

        Args:
            whose: the steps that are captured, for the log.
        """
        try:
            yield
            return
        except Exception as error:  # the model's own code: it may raise anything
            if "out of memory" in str(error):
                raise
            obstacle = _obstacle(error)
            _let_go(error)
        self.clear()
        self.enabled = False
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        logger.warning(
            "%s cannot be captured in CUDA graphs, so its steps are launched kernel by kernel: %s",
            whose,
            obstacle,
        )

    def report(self) -> str:
        """One line for the log."""
        if not self.enabled:
            return (
                f"captured no graphs: they are {'off' if self.device.type == 'cuda' else 'of CUDA devices'}"
            )
        graphs = "1 graph" if len(self.captured) == 1 else f"{len(self.captured)} graphs"
        return f"captured {graphs} in {self.seconds:.1f} s, {self.num_bytes / 2**30:.2f} GiB"

    def clear(self) -> None:
        """Give all graphs' memory back; none may run, or be replayed any more."""
        for replay in self.captured.values():
            replay.graph.reset()
        self.captured.clear()
        self._take_pool()

    def _take_pool(self) -> None:
        """A pool that nobody uses any more cannot be used again: take another."""
        if self._stream is not None and not self.captured:
            self._pool = torch.cuda.graph_pool_handle()

    def _warm_up(self, fn: Callable[[], object], stream: torch.cuda.Stream) -> None:
        current = torch.cuda.current_stream(self.device)
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UPS - 1):
                    fn()
                with _no_waiting():
                    fn()
        finally:
            current.wait_stream(stream)
        torch.cuda.synchronize(self.device)

    def _record(self, graph: torch.cuda.CUDAGraph, fn: Callable[[], Result]) -> Result:
        # Other threads may allocate meanwhile: only this one is held to what a capture allows.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            result = fn()
            graph.capture_end()
        except BaseException:
            self._abandon(graph)
            raise
        return result

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture that failed, so that nothing of torch's is left in the middle of one."""
        assert self._pool is not None
        try:
            graph.capture_end()
        except RuntimeError:  # the driver ended it, and torch has seen to nothing that follows
            index = torch.cuda.current_device() if self.device.index is None else self.device.index
            with contextlib.suppress(RuntimeError):  # raised where allocation had ended already
                torch._C._cuda_endAllocateToPool(index, self._pool)
                torch._C._cuda_releasePool(index, self._pool)
            _renew_generator(index)
        graph.reset()
        self._take_pool()


@contextlib.contextmanager
def _no_waiting() -> Iterator[None]:
    """Waiting for the device raises here: in a capture it would leave torch's own state broken."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection: what it destroys could call the driver in the middle of a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _renew_generator(index: int) -> None:
    """Give the device's generator of random numbers a state that takes part in no capture, at its place."""
    generator = torch.cuda.default_generators[index]
    fresh = torch.Generator(torch.device("cuda", index))
    fresh.set_state(generator.get_state())
    generator.graphsafe_set_state(fresh.graphsafe_get_state())


def _obstacle(error: Exception) -> str:
    """What raised ``error``, and where: the innermost line that is not torch's own."""
    said = (str(error).strip().splitlines() or [""])[0]
    text = f"{type(error).__name__}: {said}" if said else type(error).__name__
    torchs = Path(torch.__file__).parent
    lines = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if torchs not in Path(frame.filename).parents
    ]
    if not lines:
        return text
    return f"{text} at `{lines[-1].line}` ({Path(lines[-1].filename).name}:{lines[-1].lineno})"


def _let_go(error: BaseException | None) -> None:
    """Drop the tensors that the frames of ``error`` hold, for as long as somebody holds it."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
