"""A tiny model, what one engine says with it, and engines that die on demand in a replica's place."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "max_model_len": 1024,
    "num_gpu_blocks_override": 1024,
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 4},
}


def descendants(root: int) -> set[tuple[int, str]]:
    """Processes below ``root``, each with the time it started at, which no later one of that id has."""
    parents: dict[int, tuple[int, str]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (told := stat_of(int(entry.name))) is not None:
            parents[int(entry.name)] = told
    found = set()
    for pid, (_, started) in parents.items():
        above = pid
        while above in parents and above != root:
            above = parents[above][0]
        if above == root and pid != root:
            found.add((pid, started))
    return found


def stat_of(pid: int) -> tuple[int, str] | None:
    """Parent and start of a process that lives."""
    try:
        state, parent, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state == "Z" else (int(parent), rest[17])


def alive(processes: set[tuple[int, str]]) -> set[int]:
    return {pid for pid, started in processes if (told := stat_of(pid)) is not None and told[1] == started}


def commands(pids: set[int]) -> dict[int, str]:
    """Of processes that live."""
    found = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            found[pid] = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:200]
    return found


@pytest.fixture(scope="session")
def processes() -> Any:
    """What the system says of processes."""
    return SimpleNamespace(descendants=descendants, alive=alive, commands=commands)


@pytest.fixture(scope="session")
def engine_options() -> dict[str, Any]:
    """Keywords of every engine."""
    return ENGINE


@pytest.fixture(scope="session")
def fleet_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It speaks in circles, so that prompt lookup has drafts accepted."""
    pytest.importorskip("ray", reason="no Ray")
    import torch
    from specdecode.testing.tiny import tiny_checkpoint

    torch.set_num_threads(1)
    return tiny_checkpoint(
        tmp_path_factory.mktemp("fleet") / "tiny", output_scale=0.3, max_position_embeddings=1024
    )


@pytest.fixture(scope="module")
def one_engine(fleet_model: Path) -> Iterator[Any]:
    """What a fleet has to say, by an engine that nobody kills."""
    from specdecode import AsyncLLM

    llm = AsyncLLM(str(fleet_model), **ENGINE)
    yield llm
    llm.shutdown()


class DyingReplicas:
    """Replicas that are all the same engine; attempt ``i`` is lost at its token ``deaths[i]``; 0: before all.

    Args:
        change: of outputs, by attempt: replicas that are not alike.
    """

    def __init__(
        self,
        llm: Any,
        deaths: list[int],
        *,
        shunned: float = 0.0,
        change: Callable[[int, Any], Any] | None = None,
    ) -> None:
        self.llm = llm
        self.asks: list[Any] = []
        self.open = 0
        self._deaths = deaths
        self._shunned = shunned
        self._change = change or (lambda attempt, output: output)

    async def generate(self, ask: Any) -> AsyncGenerator[Any, None]:
        from specdec_fleet.errors import ReplicaLost
        from specdec_fleet.messages import Accepted
        from specdecode.api.params import RequestOutputKind

        attempt = len(self.asks)
        self.asks.append(ask)
        death = self._deaths[attempt] if attempt < len(self._deaths) else 1 << 30
        given = 0
        self.open += 1
        name = f"{ask.request_id}-{attempt}"
        stream = None
        try:
            stream = await self.llm.add_request(name, ask.prompt, ask.params, priority=ask.priority)
            if not death:
                raise ReplicaLost("killed", shunned=self._shunned)
            yield Accepted(f"replica-{attempt}")
            async for output in stream:
                tokens = sum(len(one.token_ids) for one in output.outputs)
                given = given + tokens if ask.params.output_kind is RequestOutputKind.DELTA else tokens
                if given >= death:  # by tokens, as a slow reader gets several steps' as one message
                    raise ReplicaLost("killed", shunned=self._shunned)
                slim = attrs.evolve(output, prompt=None, prompt_token_ids=(), request_id=ask.request_id)
                yield self._change(attempt, slim)
        finally:
            self.open -= 1
            if stream is not None:
                stream.close()

    async def call(self, method: str, *args: Any) -> Any:
        from specdec_fleet.messages import Description

        if method == "prepare":
            (question,) = args
            return await self.llm.prepare(question.prompt, question.params, where=question.where)
        assert method == "describe"
        return Description(
            facts=self.llm.facts,
            tokenizer=self.llm.get_tokenizer(),
            defaults=self.llm.get_default_sampling_params(),
        )

    async def broadcast(self, method: str, *args: Any, timeout: float) -> list[Any]:
        assert method in ("metrics", "check_health")
        return [("a", await self.llm.get_metrics())] if method == "metrics" else [None]


@pytest.fixture
def fleet_of(one_engine: Any) -> Callable[..., Any]:
    """``(FleetLLM, its replicas)``, to be made inside an event loop."""

    async def make(deaths: list[int], **options: Any) -> Any:
        from specdec_fleet.client import FleetLLM, Tolerance

        limits = {"retries": 3, "patience": 30.0, "silence": 30.0}
        limits |= {name: options.pop(name) for name in list(options) if name in limits}
        replicas = DyingReplicas(one_engine, deaths, **options)
        return await FleetLLM.connect(replicas, Tolerance(**limits)), replicas

    return make
