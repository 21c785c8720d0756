"""Tells an output that differs by rounding from one that differs by a fault."""

from __future__ import annotations

from collections.abc import Sequence

from ..api.llm import LLM
from ..api.params import SamplingParams
from ..contract import ConfigError
from ..engine.divergence import TIE_STEPS, Divergence, Pick, explain
from ..sampling import UnseededStream, resolve_seed

__all__ = ["TIE_STEPS", "Divergence", "Pick", "explain_divergence"]


def explain_divergence(
    llm: LLM,
    prompt_ids: Sequence[int],
    ids_a: Sequence[int],
    ids_b: Sequence[int],
    params: SamplingParams,
    *,
    index: int = 0,
) -> Divergence | None:
    """Why two outputs of one request differ; None if they do not.

    The prompt and what the outputs share are computed once more in one dense forward of the engine's
    own model: no pages, no batch, no cache, no drafts. A pick that would be drawn there if its logit
    were at most :data:`TIE_STEPS` bfloat16 steps higher may be rounding's doing; if both are such, the
    difference is a "tie", else a "bug".

    Args:
        llm: an engine on the model that gave the outputs; its state is neither used nor changed.
        prompt_ids: the prompt.
        ids_a, ids_b: output token ids under ``params``, for example without speculation and with it.
        params: of the request; sampled ones must have a seed.
        index: which completion of the prompt.

    Raises:
        ConfigError: the request cannot be drawn again, or an id is outside the vocabulary.
    """
    engine = llm.llm_engine
    for name, ids in (("ids_a", ids_a), ("ids_b", ids_b)):
        if outside := [token for token in ids if not 0 <= token < engine.target.vocab_size]:
            raise ConfigError(
                f"{name} must hold token ids between 0 and {engine.target.vocab_size - 1}, got {outside[0]}"
            )
    if not params.greedy and params.seed in (None, -1):
        raise ConfigError(
            f"params.seed must be the seed that the outputs were drawn with, got {params.seed!r}: give the "
            "request a seed, or temperature=0"
        )
    prompt = engine.prepare({"prompt_token_ids": prompt_ids}, params)
    seed = resolve_seed(params.seed, UnseededStream(0))
    request = engine.build_request("explained", prompt, params.snapshot(), seed=seed, index=index)
    return explain(engine.core.runner.model, request, list(ids_a), list(ids_b))
