"""Engines of one shape with random weights, one at a time; and a shape whose greedy output loops."""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import numpy as np
import torch
from specdecode import LLM
from specdecode.models import loader
from timing import Prompts

#: The Llama-3.1-8B shape: a config without weights.
SHAPE = Path(__file__).parent / "llama-8b-shape"
#: An EAGLE-3 head for it, and Llama-3.2-1B's.
EAGLE3, DRAFT = SHAPE.with_name("eagle3-8b-shape"), SHAPE.with_name("llama-1b-shape")
#: Length of the cycle that the looping weights write.
PERIOD = 16
#: Factor of what their attention and MLP add: little beside the embedding, but no zeros.
_WRITTEN = 1e-3


@attrs.define(kw_only=True)
class Engines:
    """Opens an engine by its configuration and keeps it until another one is asked for."""

    model: str
    keywords: Mapping[str, Any]
    _key: Any = None
    _llm: LLM | None = None
    start_seconds: dict[str, float] = attrs.Factory(dict)  #: of each engine that was opened, by its name

    def get(
        self,
        name: str,
        *,
        max_num_seqs: int,
        speculative_config: Mapping[str, Any] | None = None,
        looping: bool = False,
    ) -> LLM:
        """The engine of a configuration; ``name``: what its start-up time is reported under."""
        key = (max_num_seqs, repr(speculative_config), looping)
        if self._llm is not None and key == self._key:
            return self._llm
        self.close()
        start = time.perf_counter()
        with _looping_weights() if looping else contextlib.nullcontext():
            self._llm = LLM(
                self.model,
                speculative_config=speculative_config,
                load_format="dummy",
                skip_tokenizer_init=True,
                enable_prefix_caching=False,
                **{"max_num_seqs": max_num_seqs} | dict(self.keywords),
            )
        self.start_seconds[name] = time.perf_counter() - start
        self._key = key
        return self._llm

    def close(self) -> None:
        """Free the engine's memory, for the next one or for another program's model."""
        if self._llm is not None:
            self._llm.shutdown()
        self._llm = self._key = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


@contextlib.contextmanager
def _looping_weights() -> Iterator[None]:
    """Dummy weights of the engines made inside: token ``t`` is followed by the next one of its cycle.

    Each output row is the embedding of the token before it in the cycle, so the greedy token is sure,
    while every weight is read and multiplied as ever.
    """
    fill = loader.randomize

    def looping(decoder: Any, **options: Any) -> None:
        fill(decoder, **options)
        if decoder.config.tie_word_embeddings:
            raise ValueError("the looping weights want an output layer of their own")
        ids = torch.arange(decoder.config.vocab_size, device=decoder.device)
        first = ids // PERIOD * PERIOD
        whole = first + PERIOD <= decoder.config.vocab_size
        before = torch.where(whole, first + (ids - 1) % PERIOD, ids)
        decoder.lm_head.weight.data.copy_(decoder.embed_tokens.weight.data[before])
        for layer in decoder.layers:
            layer.self_attn.o_proj.weight.data.mul_(_WRITTEN)
            layer.mlp.down_proj.weight.data.mul_(_WRITTEN)

    with mock.patch.object(loader, "randomize", looping):
        yield


def looping_prompts(batch: int, context: int, vocab_size: int, seed: int) -> Prompts:
    """Prompts in the middle of a cycle of the looping weights, another cycle for each."""
    rng = np.random.default_rng(seed)
    cycles = rng.choice(vocab_size // PERIOD - 1, batch, replace=batch >= vocab_size // PERIOD) * PERIOD
    places = np.arange(context) % PERIOD
    return [{"prompt_token_ids": (int(cycle) + places).tolist()} for cycle in cycles]


@contextlib.contextmanager
def without_advice() -> Iterator[None]:
    """No advice on drafts that nothing could make good."""
    from specdecode.engine import advice

    logger = logging.getLogger(advice.__name__)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
