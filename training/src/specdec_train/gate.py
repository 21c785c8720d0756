"""Judging a published checkpoint: through the plugin, as a user will run it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
from specdecode import SamplingParams
from specdecode.bench.counters import Counters
from specdecode.bench.engines import engine_pair
from specdecode.contract import SpecdecodeError

_ROUNDS = 2


class GateRefused(SpecdecodeError):
    """A checkpoint that is not to be published."""


@attrs.frozen(kw_only=True)
class Verdict:
    """What the gate found; times are of greedy answers to held-out prompts, one at a time."""

    acceptance_length: float
    per_position: tuple[float, ...]
    plain_tokens_per_s: float
    tokens_per_s: float
    identical: bool  #: with and without speculation
    conformance: str  #: the kit's summary
    conforms: bool

    @property
    def speedup(self) -> float:
        return self.tokens_per_s / self.plain_tokens_per_s

    @property
    def faults(self) -> tuple[str, ...]:
        """Why it must not be published. One that does not conform is not even published if that is forced."""
        found = []
        if not self.conforms:
            found.append(f"the conformance kit fails: {self.conformance}")
        if self.acceptance_length <= 1:
            found.append("no draft was accepted")
        if self.speedup <= 1:
            found.append(
                f"it loses time: {self.tokens_per_s:.1f} tokens/s, {self.plain_tokens_per_s:.1f} without"
            )
        return tuple(found)


def judge(
    model: str,
    speculative_config: Mapping[str, Any],
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    conform: bool = True,
    clock: Callable[[], float] = time.perf_counter,
    **engine: Any,
) -> Verdict:
    """Reload through the plugin, answer ``prompts`` with and without, and run the conformance kit.

    The kit tries a method on ``model`` itself, on a CPU in float32.

    Args:
        prompts: token ids.
        max_tokens: of each answer.
        conform: whether to run the kit, which takes a minute on a model of 135M.
        engine: further keywords of both engines.
    """
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, detokenize=False)
    asked = [{"prompt_token_ids": list(ids)} for ids in prompts]
    longest = max(map(len, prompts)) + max_tokens + 1
    with engine_pair(
        model, speculative_config, max_batch_size=1, max_model_len=longest + 64, **engine
    ) as engines:
        seconds = [0.0, 0.0]
        written: list[list[list[int]]] = [[], []]
        for llm in engines:
            for ask in asked:  # each once: a kernel may be compiled for the length of a prompt
                llm.generate(ask, params.clone(max_tokens=min(8, max_tokens)), use_tqdm=False)
        before = Counters.read(engines[1].get_metrics())
        for turn in range(_ROUNDS):
            for side in (0, 1) if turn % 2 else (1, 0):
                start = clock()
                outputs = [engines[side].generate(ask, params, use_tqdm=False)[0] for ask in asked]
                seconds[side] += clock() - start
                if turn == 0:
                    written[side] = [list(output.outputs[0].token_ids) for output in outputs]
        counters = Counters.read(engines[1].get_metrics()) - before
    tokens = _ROUNDS * sum(map(len, written[0]))
    summary, conforms = ("not run", True) if not conform else _conformance(model, speculative_config)
    return Verdict(
        acceptance_length=counters.acceptance_length or 1.0,
        per_position=counters.acceptance_per_position or (),
        plain_tokens_per_s=tokens / seconds[0],
        tokens_per_s=tokens / seconds[1],
        identical=written[0] == written[1],
        conformance=summary,
        conforms=conforms,
    )


def _conformance(model: str, speculative_config: Mapping[str, Any]) -> tuple[str, bool]:
    from specdecode.testing.conformance import check_proposer

    given = {key: value for key, value in speculative_config.items() if key != "method"}
    report = check_proposer(speculative_config["method"], given, target=model)
    return report.summary, report.ok
