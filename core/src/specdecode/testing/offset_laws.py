"""The law of tokens by how many drafts were accepted before them: the promise of rules that weigh laws.

The first token behind a verified one, the token behind an accepted draft, and so on: a fault of a drafter's
laws bends one of these and may leave the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from .laws import assert_law
from .tiny import table_checkpoint

if TYPE_CHECKING:
    from specdecode import RequestOutput

VOCAB = 8
#: ``[VOCAB, VOCAB]``: the target's logits behind each token.
LOGITS = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(21)) * 1.3
#: Arguments of an engine under which many requests are drafted for side by side.
ENGINE: Mapping[str, Any] = {
    "max_num_seqs": 32,
    "num_gpu_blocks_override": 2000,
    "max_model_len": 128,
    "max_num_batched_tokens": 512,
}


class Answer(Protocol):
    """A :class:`~specdecode.CompletionOutput`."""

    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def token_sources(self) -> Sequence[str]: ...


def law_target(path: str | Path) -> Path:
    """Write a target whose law behind each token is :func:`law`."""
    return table_checkpoint(path, LOGITS, max_position_embeddings=256)


def law(temperature: float = 1.0) -> np.ndarray:
    """``[VOCAB, VOCAB]`` float64, the law behind each token."""
    found: np.ndarray = (LOGITS.double() / temperature).softmax(-1).numpy()
    return found


def prompts(count: int = 40) -> list[list[int]]:
    """Two tokens each, every token last in some."""
    return [[3 + index % 5, index % VOCAB] for index in range(count)]


def assert_law_of_every_offset(answers: Iterable[tuple[int, Answer]], law: np.ndarray) -> set[int]:
    """Fail unless tokens have the law behind the token before them, whatever their offset.

    Args:
        answers: the last token of each prompt, and what was answered.
        law: ``[V, V]``.

    Returns:
        The offsets that occurred: 0, and above it numbers of accepted drafts.
    """
    seen: dict[int, list[tuple[int, int]]] = {}
    for last, answer in answers:
        offset = 0
        for token, source in zip(answer.token_ids, answer.token_sources, strict=True):
            seen.setdefault(offset, []).append((last, token))
            last, offset = token, 0 if source == "target" else offset + 1
    for pairs in seen.values():
        lasts, tokens = np.array(pairs).T
        for before in set(lasts.tolist()):
            assert_law(tokens[lasts == before], law[before])
    return set(seen)


def generate(
    target: str | Path, config: Mapping[str, Any], *, temperature: float = 0.8, max_tokens: int = 70
) -> tuple[list[RequestOutput], dict[str, Any]]:
    """Answers to :func:`prompts`, drawn with speculation, and the metrics' values by name."""
    from specdecode import LLM, SamplingParams

    asked = [{"prompt_token_ids": ids} for ids in prompts()]
    params = [
        SamplingParams(temperature=temperature, seed=1000 + i, max_tokens=max_tokens, ignore_eos=True)
        for i in range(len(asked))
    ]
    options = {"dtype": "float32", "device": "cpu", "skip_tokenizer_init": True, **ENGINE}
    with LLM(str(target), speculative_config=dict(config), **options) as llm:
        outputs = llm.generate(asked, params, use_tqdm=False)
        return outputs, {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}


def answers_of(outputs: Iterable[RequestOutput]) -> list[tuple[int, Answer]]:
    """As :func:`assert_law_of_every_offset` takes them."""
    return [(output.prompt_token_ids[-1], output.outputs[0]) for output in outputs]
