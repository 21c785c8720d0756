"""The requests that the kit makes: short, long, repetitive and random prompts, greedy and sampled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

if TYPE_CHECKING:
    from ...api.params import SamplingParams

#: Longest sequence that the kit's requests reach, prompt included.
MAX_MODEL_LEN = 96

#: Prompt length, length of the pattern that it repeats (0: random ids), parameters.
_KINDS: tuple[tuple[int, int, dict[str, Any]], ...] = (
    (12, 4, {"temperature": 0.0, "max_tokens": 14}),
    (19, 0, {"temperature": 0.9, "top_p": 0.9, "seed": 5, "max_tokens": 12}),
    (26, 6, {"temperature": 0.0, "max_tokens": 20}),
    (5, 0, {"temperature": 0.0, "max_tokens": 17}),
    (16, 3, {"temperature": 0.7, "top_k": 5, "seed": 2**40, "max_tokens": 12}),
    (33, 0, {"temperature": 0.0, "repetition_penalty": 1.2, "max_tokens": 9}),
    (21, 5, {"temperature": 1.1, "seed": 3, "max_tokens": 16}),
    (14, 7, {"temperature": 0.0, "max_tokens": 1}),
)


@attrs.frozen(kw_only=True, eq=False)
class Ask:
    """A request of the kit. Its ``key`` tells it from all others of an engine."""

    key: str
    prompt: tuple[int, ...]
    params: SamplingParams
    namespace: str = ""

    def named(self, key: str, namespace: str = "") -> Ask:
        """The same request under another key."""
        return attrs.evolve(self, key=key, namespace=namespace)


def asks(vocab_size: int) -> list[Ask]:
    """The kit's requests, keyed ``ask-0`` and so on; the same for equal vocabularies."""
    from ...api.params import SamplingParams

    made = []
    for index, (length, pattern, params) in enumerate(_KINDS):
        ids = np.random.default_rng(index).integers(3, vocab_size, pattern or length)
        prompt = np.resize(ids, length).tolist()
        made.append(Ask(key=f"ask-{index}", prompt=tuple(prompt), params=SamplingParams(**params)))
    return made
